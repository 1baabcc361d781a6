"""Sampling text from a model, token by token, over a cache of what came before."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from nag_jax.data.packing import utf8_length
from nag_jax.errors import UserError
from nag_jax.models.transformer import LanguageModel
from nag_jax.sharding import rules

# Prompts and caches have these lengths, or multiples of the last: a few programs serve all.
_BUCKETS = (64, 128, 256)

# What `choose_token` says of logits that have no most likely token.
_NOT_A_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Generation:
    """A continuation.

    Attributes:
        text: The continuation alone.
        tokens: Its tokens.
        stop: Why it ended: "document" (the model began a new document), "context" (no room for
            another token) or "max_tokens".
    """

    text: str
    tokens: tuple[int, ...]
    stop: str


def choose_token(
    logits: Float[Array, " V"],
    key: jax.Array,
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
) -> Int[Array, ""]:
    """Samples one token.

    Args:
        logits: Logits over the vocabulary.
        key: Random key.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Only the k most likely tokens may be drawn; 0 for all.
        top_p: Only the most likely tokens that together reach this probability; at least one.

    Returns:
        The token; -1 where the logits are not finite numbers.
    """
    scaled = logits / jnp.maximum(temperature, 1e-6)
    allowed = jax.lax.cond(
        (top_k > 0) | (top_p < 1),
        lambda: most_likely(scaled, jnp.where(top_k > 0, top_k, len(logits)), top_p),
        lambda: jnp.ones(logits.shape, bool),
    )
    # One number inverts the distribution function; Gumbel noise needs one for each token.
    weights = jnp.where(allowed, jnp.exp(scaled - jnp.max(scaled)), 0)
    below = jnp.where(allowed, jnp.cumsum(weights), 0)
    drawn = jnp.argmax(below > jax.random.uniform(key) * jnp.max(below))
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits))
    return jnp.where(jnp.isfinite(jnp.max(logits)), token, _NOT_A_TOKEN)


def most_likely(
    logits: Float[Array, " V"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Bool[Array, " V"]:
    """Marks the `top_k` most likely tokens that together reach the probability `top_p`.

    A token counts while fewer than `top_k` tokens, with less than `top_p`, go before it; of equal
    ones the first goes first. The least logit that still counts is found by bisection over the bits
    of a float, 32 passes over the vocabulary, since sorting it takes many times longer on CPU.

    Args:
        logits: Logits over the vocabulary; compared in float32.
        top_k: At least 1.
        top_p: Above 0.

    Returns:
        Which tokens count; at least one does.
    """
    probabilities = jax.nn.softmax(logits)
    # Integers in the order of the floats; the two zeros are one.
    logits = jnp.where(logits == 0, 0, logits.astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)

    def before(level):
        above = ordered > level
        return jnp.sum(above), jnp.sum(jnp.where(above, probabilities, 0))

    def counts(number, probability):
        return (number < top_k) & (probability < top_p)

    def halve(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        fits = counts(*before(middle))
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    limits = jnp.iinfo(jnp.int32)
    level, _ = jax.lax.fori_loop(0, 32, halve, (jnp.int32(limits.min), jnp.int32(limits.max)))
    number, probability = before(level)
    equal = ordered == level
    rank = jnp.cumsum(equal) - 1
    return (ordered > level) | (equal & counts(number + rank, probability + rank * probabilities))


class Programs(NamedTuple):
    """Jitted functions of one model: they compile once for each bucket of shapes."""

    first: Callable  # whole prompts in, one token a row and the state out
    advance: Callable  # one token a row in, the next one and the state out; the state is donated


@functools.lru_cache(maxsize=8)
def decode_programs(model: LanguageModel) -> Programs:
    """Returns the programs that `generate` runs."""

    def choose(logits, state, keys, settings):
        # The number of tokens before, so that a row's draws do not depend on its padding.
        lengths = state["position"] - state["start"]
        keys = jax.vmap(jax.random.fold_in)(keys, lengths)
        return jax.vmap(choose_token, (0, 0, None, None, None))(logits, keys, *settings), state

    def first(variables, tokens, start, length, step, keys, settings):
        params, balance = variables
        out = model.prefill(params, tokens, start, length, step, balance)
        return choose(*out, keys, settings)

    def advance(variables, state, tokens, step, keys, settings):
        params, balance = variables
        out = model.decode_step(params, tokens, state, step, balance)
        return choose(*out, keys, settings)

    return Programs(
        jax.jit(first, static_argnames="length"), jax.jit(advance, donate_argnames="state")
    )


def bucket(length: int) -> int:
    """Columns of the prompts, or of the cache, that serve so many."""
    for size in _BUCKETS:
        if length <= size:
            return size
    return -(-length // _BUCKETS[-1]) * _BUCKETS[-1]


def check_settings(
    *, max_tokens: int | None, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """Refuses settings of `generate` that no model could use.

    Raises:
        UserError: One of them is out of range, or no number of its kind.
    """
    for name, value in (("top_k", top_k), ("max_tokens", max_tokens), ("seed", seed)):
        if not (isinstance(value, int | np.integer) or (name == "max_tokens" and value is None)):
            raise UserError(f"{name} is {value!r}; it must be a whole number")
    for name, value, fits, words in (
        ("temperature", temperature, 0 <= temperature < float("inf"), "at least 0 and finite"),
        ("top_k", top_k, top_k >= 0, "at least 0 (0 for all tokens)"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("max_tokens", max_tokens, max_tokens is None or max_tokens >= 1, "at least 1"),
        ("seed", seed, 0 <= seed < 2**32, "between 0 and 4294967295"),
    ):
        if not fits:
            raise UserError(f"{name} is {value}; it must be {words}")


def encode_prompt(tokenizer: Any, prompt: str, context: int) -> list[int]:
    """The tokens of a prompt, the beginning-of-document token first.

    Raises:
        UserError: The prompt is no text or not Unicode, or leaves no room in the context.
    """
    if not isinstance(prompt, str):
        raise UserError(f"the prompt is {prompt!r}; it must be text")
    utf8_length(prompt, "the prompt")
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    if len(ids) > context:
        raise UserError(
            f"the prompt has {len(ids)} tokens with the beginning-of-document token, but the "
            f"model's context holds {context} (data.row_length): shorten it"
        )
    return ids


def generate(
    model: LanguageModel,
    params: dict[str, Any],
    balance: dict[str, Any],
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    step: int,
    mesh: Mesh,
    context: int,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    on_text: Callable[[int, str], None] | None = None,
    batch_size: int = 32,
) -> list[Generation]:
    """Continues each prompt until a new document, the context's end or `max_tokens`.

    Prompts run together, each token over the cached keys and values of those before. What a prompt
    gives depends on its place among the prompts, but not on what the others are.

    Args:
        model: The model.
        params: Its parameters on `mesh`.
        balance: Its balance; empty where it has none.
        tokenizer: The run's tokenizer.
        prompts: Texts to continue; may be empty ones.
        step: Optimizer steps behind the parameters.
        mesh: Where the parameters live.
        context: Tokens that the model was trained to see, the beginning-of-document token included.
        max_tokens: At most so many new tokens a prompt; None for as many as fit.
        temperature: Divides the logits; 0 takes the most likely token each time.
        top_k: Only the k most likely tokens may be drawn; 0 for all.
        top_p: Only the most likely tokens that together reach this probability.
        seed: Seed of the draws; the same seed gives the same texts.
        on_text: Called with a prompt's number and each piece of its text as soon as it is whole.
        batch_size: Prompts that run together; no result depends on it.

    Returns:
        The continuations in the order of the prompts, and why each ended.

    Raises:
        UserError: As `check_settings` and `encode_prompt`, or the model gives no numbers.
    """
    check_settings(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    if isinstance(prompts, str):
        raise UserError("prompts must be a list of texts, not one text")
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1")
    ids = [encode_prompt(tokenizer, prompt, context) for prompt in prompts]
    rows = [_Row(tokenizer, len(tokens), context, max_tokens) for tokens in ids]
    settings = (
        jnp.float32(min(temperature, float(jnp.finfo(jnp.float32).max))),
        jnp.int32(min(top_k, model.vocab_size)),
        jnp.float32(top_p),
    )
    programs, step = decode_programs(model), jnp.int32(step)
    with jax.set_mesh(mesh):
        params = model.decoding_params(params)
        for first in range(0, len(ids), batch_size):
            chosen = slice(first, first + batch_size)
            batch = _Batch.of(ids[chosen], first, context, seed, tokenizer.bos_id, mesh)
            most = max(row.limit for row in rows[chosen])
            tokens = batch.run(programs, (params, balance), most, step, settings)
            for count, new in enumerate(tokens, 1):
                for index, row in enumerate(rows[chosen], first):
                    piece = row.add(index, count, int(new[index - first]))
                    if piece and on_text is not None:
                        on_text(index, piece)
                if all(row.stop for row in rows[chosen]):
                    break
    return [Generation("".join(row.pieces), tuple(row.tokens), row.stop) for row in rows]


class _Batch(NamedTuple):
    """Prompts that run together.

    Attributes:
        tokens: The prompts, each with its padding on the left, int32 [B, P].
        start: Column of each prompt's first token, [B].
        keys: Random key of each row.
    """

    tokens: np.ndarray
    start: np.ndarray
    keys: jax.Array

    @classmethod
    def of(
        cls, ids: list[list[int]], first: int, context: int, seed: int, filler: int, mesh: Mesh
    ) -> "_Batch":
        """Pads prompts, the first of which is number `first`, to a bucket of rows and columns."""
        columns = min(bucket(max(map(len, ids))), context)
        count = padded_count(len(ids), mesh)
        tokens = np.full((count, columns), filler, np.int32)
        for row, sequence in zip(tokens, ids, strict=False):
            row[columns - len(sequence) :] = sequence
        lengths = [len(sequence) for sequence in ids] + [1] * (count - len(ids))
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        keys = fold(jax.random.key(seed), first + jnp.arange(count))
        return cls(tokens, columns - np.array(lengths, np.int32), keys)

    def run(
        self, programs: Programs, variables: Any, most: int, step: jax.Array, settings: Any
    ) -> Iterator[np.ndarray]:
        """The next token of every row, up to `most` times."""
        length = bucket(self.tokens.shape[1] + most - 1)
        drawn, state = programs.first(
            variables, self.tokens, self.start, length, step, self.keys, settings
        )
        for number in range(1, most + 1):
            current = drawn
            if number < most:  # is under way while this one is decoded
                drawn, state = programs.advance(
                    variables, state, current, step, self.keys, settings
                )
            yield np.asarray(current)


class _Row:
    """One continuation as it grows."""

    def __init__(self, tokenizer: Any, prompt_length: int, context: int, max_tokens: int | None):
        room = context + 1 - prompt_length
        self.limit = room if max_tokens is None else min(room, max_tokens)
        self.at_limit = "context" if self.limit == room else "max_tokens"
        self.bos_id, self.text_stream = tokenizer.bos_id, tokenizer.stream()
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.stop = ""

    def add(self, index: int, count: int, token: int) -> str:
        """Takes the next token, unless the row has stopped; returns the text it completes.

        Raises:
            UserError: It is no token; names the prompt `index` and the place `count`.
        """
        if self.stop:
            return ""
        if token == _NOT_A_TOKEN:
            raise UserError(
                f"the model's logits for token {count} after prompt {index} are not finite "
                "numbers: its parameters cannot be used"
            )
        piece = ""
        if token == self.bos_id:
            self.stop = "document"
        else:
            self.tokens.append(token)
            piece = self.text_stream.push(token)
            if len(self.tokens) == self.limit:
                self.stop = self.at_limit
        if self.stop:
            piece += self.text_stream.flush()
        self.pieces.append(piece)
        return piece


def padded_count(prompts: int, mesh: Mesh) -> int:
    """Rows of the batch: a power of two, and a multiple of the devices that share rows."""
    count = 1 << (prompts - 1).bit_length()
    shards = rules.batch_shards(mesh)
    return -(-count // shards) * shards
