"""Log-likelihoods of continuations given their contexts, as multiple-choice benchmarks ask for.

Pairs of texts become rows of one document each, BOS first as in training; rows of like length are
scored together. Which tokens belong to a continuation is decided as in lm-evaluation-harness.
"""

import functools
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int32

from nag_jax.data.packing import utf8_length
from nag_jax.data.progress import Progress
from nag_jax.errors import UserError
from nag_jax.models.transformer import LanguageModel
from nag_jax.sharding import rules

_SHORTEST_ROW = 64  # shorter rows are padded to it: they cost little, and a program saved is more


class Scored(NamedTuple):
    """What a model makes of a continuation; the first two fields are lm-evaluation-harness' answer.

    Attributes:
        log_likelihood: Natural logarithm of the continuation's probability after its context, the
            sum over its tokens.
        greedy: Whether each of its tokens is the most likely one.
        tokens: How many tokens were scored.
        dropped: How many tokens at the context's beginning found no room in the model's context.
    """

    log_likelihood: float
    greedy: bool
    tokens: int
    dropped: int


class Request(NamedTuple):
    """A pair as a row: its tokens, BOS first, of which those from `begin` on are scored."""

    tokens: Int32[np.ndarray, " n"]
    begin: int
    dropped: int


def _check_pair(pair: Any, name: str) -> tuple[str, str]:
    texts = pair if isinstance(pair, tuple | list) else ()
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{name} is {reprlib.repr(pair)}; it must be two strings, (context, continuation)"
        )
    context, continuation = texts
    for text, part in ((context, "context"), (continuation, "continuation")):
        utf8_length(text, f"{name}, the {part}")
    if not continuation:
        raise UserError(f"{name}: the continuation is empty, so there is nothing to score")
    return context, continuation


def first_scored(whole: Sequence[int], context: Sequence[int]) -> int:
    """Where the continuation's tokens begin in the tokens of context and continuation together.

    They follow as many tokens as the context alone has. A token that holds the context's end and
    the continuation's beginning thus counts as context, unless that leaves no token: then they
    begin where the tokens differ from the context's own.

    Args:
        whole: Tokens of the two texts together.
        context: Tokens of the context alone.

    Returns:
        The index; `len(whole)` if the continuation adds no token.
    """
    if len(whole) > len(context):
        return len(context)
    differing = (i for i, token in enumerate(whole) if token != context[i])
    return next(differing, len(whole))


def encode_pairs(
    tokenizer: Any, pairs: Iterable[tuple[str, str]], context: int
) -> tuple[list[Request], list[int]]:
    """Makes rows of pairs.

    White space at a context's end is taken as the continuation's, since tokens of today's
    vocabularies begin with a space. The two are then encoded as one text. What is longer than the
    model's context loses the beginning of its own context, never BOS.

    Args:
        tokenizer: The run's tokenizer.
        pairs: (context, continuation) pairs.
        context: Tokens that the model was trained to see, BOS included.

    Returns:
        The rows, and the bytes of each pair's text.

    Raises:
        UserError: A pair is not two strings of Unicode, or its continuation is empty or longer
            than the model's context.
    """
    wholes, contexts = [], []
    for i, pair in enumerate(pairs):
        before, after = _check_pair(pair, f"pairs[{i}]")
        wholes.append(before + after)
        contexts.append(before.rstrip())
    requests = []
    encoded = zip(tokenizer.encode_batch(wholes), tokenizer.encode_batch(contexts), strict=True)
    for i, (whole, before) in enumerate(encoded):
        begin = first_scored(whole.tolist(), before.tolist())
        count = len(whole) - begin
        if count == 0:
            raise UserError(f"pairs[{i}]: the continuation adds no token to its context")
        if count > context:
            raise UserError(
                f"pairs[{i}]: the continuation has {count} tokens, but the model's context holds "
                f"{context} (data.row_length): shorten it"
            )
        dropped = max(0, len(whole) - context)
        tokens = np.concatenate([[tokenizer.bos_id], whole[dropped:]]).astype(np.int32)
        requests.append(Request(tokens, 1 + begin - dropped, dropped))
    return requests, [len(text.encode()) for text in wholes]


@functools.lru_cache(maxsize=8)
def _scorer(model: LanguageModel, mesh: Mesh) -> Callable:
    def score(params, balance, batch, step):
        out = model.evaluate_batch(params, batch, step, False, balance)
        return out["nats"], out["correct"]

    return jax.jit(score, out_shardings=NamedSharding(mesh, P()))


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def _stack(requests: Sequence[Request], rows: int, length: int) -> dict[str, np.ndarray]:
    """A batch of `rows` rows of `length` + 1 tokens; padding is on the right and below."""
    tokens = np.zeros((rows, length + 1), np.int32)
    segment_ids = np.zeros_like(tokens)
    for i, request in enumerate(requests):
        tokens[i, : len(request.tokens)] = request.tokens
        segment_ids[i, : len(request.tokens)] = 1
    return {"tokens": tokens, "segment_ids": segment_ids, "valid": segment_ids > 0}


def score_pairs(
    model: LanguageModel,
    params: dict[str, Any],
    balance: dict[str, Any],
    tokenizer: Any,
    pairs: Iterable[tuple[str, str]],
    *,
    step: int,
    mesh: Mesh,
    context: int,
    batch_size: int = 16,
    progress: bool = True,
) -> list[Scored]:
    """Log-likelihood of each continuation after its context; see `encode_pairs` for the rows.

    Rows are taken from the longest to the shortest, so that those of a batch are of like length,
    and padded to a power of two: a few programs serve all. No result depends on the other pairs.

    Args:
        model: The model.
        params: Its parameters on `mesh`.
        balance: Its balance; empty where it has none.
        tokenizer: The run's tokenizer.
        pairs: (context, continuation) pairs; an empty context leaves BOS alone.
        step: Optimizer steps behind the parameters.
        mesh: Where the parameters live.
        context: Tokens that the model was trained to see, BOS included.
        batch_size: Rows per forward pass, rounded up to what the mesh divides.
        progress: Whether to show on stderr how far it is.

    Returns:
        What each pair scored, in the order of the pairs.

    Raises:
        UserError: As `encode_pairs`, or `batch_size` is below 1.
    """
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1")
    requests, sizes = encode_pairs(tokenizer, pairs, context)
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
    rows = min(batch_size, _power_of_two(max(len(order), 1)))
    shards = rules.batch_shards(mesh)
    rows = -(-rows // shards) * shards
    scored: dict[int, Scored] = {}
    done = 0
    with Progress("Scoring", sum(sizes), progress) as shown, jax.set_mesh(mesh):
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            longest = len(requests[chosen[0]].tokens) - 1  # inputs: the last is a target alone
            length = min(max(_power_of_two(longest), _SHORTEST_ROW), context)
            batch = _stack([requests[i] for i in chosen], rows, length)
            placed = jax.device_put(batch, rules.batch_sharding(mesh))
            out = _scorer(model, mesh)(params, balance, placed, jnp.asarray(step, jnp.int32))
            nats, correct = jax.device_get(out)
            for row, i in enumerate(chosen):
                request = requests[i]
                targets = (row, slice(request.begin - 1, len(request.tokens) - 1))
                scored[i] = Scored(
                    log_likelihood=-float(nats[targets].sum(dtype=np.float64)),
                    greedy=bool(correct[targets].all()),
                    tokens=len(request.tokens) - request.begin,
                    dropped=request.dropped,
                )
                done += sizes[i]
            shown.update(done, f"{len(scored)} of {len(order)} pairs")
    return [scored[i] for i in range(len(order))]
