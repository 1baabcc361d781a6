"""Sampling text from a model, token by token."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from nag_jax.data.packing import utf8_length
from nag_jax.errors import UserError
from nag_jax.models.transformer import LanguageModel

# Sequences are padded to these lengths (and multiples of the last): a few programs serve all.
_BUCKETS = (64, 128, 256, 512)


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
        The token.
    """
    order = jnp.argsort(-logits, stable=True)
    scaled = logits[order] / jnp.maximum(temperature, 1e-6)
    probabilities = jax.nn.softmax(scaled)
    rank = jnp.arange(logits.shape[0])
    allowed = (rank < jnp.where(top_k > 0, top_k, logits.shape[0])) & (
        jnp.cumsum(probabilities) - probabilities < top_p
    )
    allowed |= rank == 0
    drawn = jax.random.categorical(key, jnp.where(allowed, scaled, -jnp.inf))
    return order[jnp.where(temperature > 0, drawn, 0)]


@functools.lru_cache(maxsize=8)
def _sampler(model: LanguageModel) -> Callable:
    def sample(params, tokens, length, step, key, temperature, top_k, top_p):
        # Positions after `length` cannot be seen from before it.
        logits = model.next_logits(params, tokens[None], length - 1, step)[0]
        key = jax.random.fold_in(key, length)
        return choose_token(logits, key, temperature, top_k, top_p)

    return jax.jit(sample)


def _bucket(length: int) -> int:
    for size in _BUCKETS:
        if length <= size:
            return size
    return -(-length // _BUCKETS[-1]) * _BUCKETS[-1]


def check_settings(
    *, max_tokens: int | None, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """Refuses settings of `generate` that no model could use.

    Raises:
        UserError: One of them is out of range.
    """
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
        UserError: The prompt is not Unicode, or leaves no room in the context.
    """
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
    tokenizer: Any,
    prompt: str,
    *,
    step: int,
    mesh: Mesh,
    context: int,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continues a prompt until a new document, the context's end or `max_tokens`.

    Args:
        model: The model.
        params: Its parameters on `mesh`.
        tokenizer: The run's tokenizer.
        prompt: Text to continue; may be empty.
        step: Optimizer steps behind the parameters.
        mesh: Where the parameters live.
        context: Tokens that the model was trained to see, the beginning-of-document token included.
        max_tokens: At most so many new tokens; None for as many as fit.
        temperature: Divides the logits; 0 takes the most likely token each time.
        top_k: Only the k most likely tokens may be drawn; 0 for all.
        top_p: Only the most likely tokens that together reach this probability.
        seed: Seed of the draws; the same seed gives the same text.
        on_text: Called with each piece of text as soon as it is whole.

    Returns:
        The continuation and why it ended.

    Raises:
        UserError: As `check_settings` and `encode_prompt`.
    """
    check_settings(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    ids = encode_prompt(tokenizer, prompt, context)
    room = context + 1 - len(ids)
    limit = room if max_tokens is None else min(room, max_tokens)
    sampler, text_stream = _sampler(model), tokenizer.stream()
    key = jax.random.key(seed)
    top_k = min(top_k, model.vocab_size)
    temperature = min(temperature, float(jnp.finfo(jnp.float32).max))
    settings = (jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))
    new: list[int] = []
    pieces: list[str] = []

    def emit(piece: str) -> None:
        pieces.append(piece)
        if on_text is not None and piece:
            on_text(piece)

    stop = "context" if limit == room else "max_tokens"
    with jax.set_mesh(mesh):
        while len(new) < limit:
            sequence = ids + new
            padded = np.full(min(_bucket(len(sequence)), max(context, 1)), tokenizer.bos_id)
            padded[: len(sequence)] = sequence
            token = int(
                sampler(
                    params,
                    jnp.asarray(padded, jnp.int32),
                    jnp.int32(len(sequence)),
                    jnp.int32(step),
                    key,
                    *settings,
                )
            )
            if token == tokenizer.bos_id:
                stop = "document"
                break
            new.append(token)
            emit(text_stream.push(token))
    emit(text_stream.flush())
    return Generation("".join(pieces), tuple(new), stop)
