"""Sampling: allowed tokens and their frequencies, greedy decoding, stops, streaming, padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import packed_batch, random_params, small_model

from nag_jax.data.tokenizers import ByteTokenizer
from nag_jax.errors import UserError
from nag_jax.evals import generate as generate_lib
from nag_jax.evals.generate import choose_token, generate, most_likely
from nag_jax.sharding.mesh import single_device_mesh

pytestmark = pytest.mark.usefixtures("cached_compilation")

CONTEXT = 16  # row length of the tiny run


def distribution(logits, temperature, top_k, top_p):
    """The probabilities a token is drawn with, from the definitions, in float64."""
    logits = np.asarray(logits, np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return np.eye(len(logits))[order[0]]
    weights = np.exp((logits - logits.max()) / temperature)
    p = weights / weights.sum()
    allowed, reached = [], 0.0
    for rank, token in enumerate(order):
        if rank and ((top_k and rank >= top_k) or reached >= top_p):
            break
        allowed.append(token)
        reached += p[token]
    kept = np.zeros_like(p)
    kept[allowed] = p[allowed]
    return kept / kept.sum()


def draws(logits, count, temperature, top_k, top_p):
    keys = jax.random.split(jax.random.key(0), count)
    settings = (jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))
    choose = jax.jit(jax.vmap(choose_token, (None, 0, None, None, None)))
    return np.asarray(choose(jnp.asarray(logits, jnp.float32), keys, *settings))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 3, 1.0),
        (1.0, 1, 1.0),
        (1.0, 99, 1.0),
        (1.0, 0, 0.7),
        (1.0, 0, 1e-9),
        (1.5, 4, 0.8),
        (0.0, 0, 1.0),
        (0.0, 5, 0.5),
    ],
)
def test_frequencies(temperature, top_k, top_p):
    logits = np.array([0.3, 2.0, -1.0, 1.1, 2.0, -50.0, 0.9])
    expected = distribution(logits, temperature, top_k, top_p)
    count = 4000
    seen = np.bincount(draws(logits, count, temperature, top_k, top_p), minlength=7) / count
    assert not seen[expected == 0].any()
    np.testing.assert_allclose(seen, expected, atol=4.5 * np.sqrt(0.25 / count))


@given(
    logits=st.lists(st.sampled_from([-3.5, -1.0, -0.0, 0.0, 0.25, 2.0]), min_size=9, max_size=9),
    top_k=st.integers(1, 9),
    top_p=st.sampled_from([0.1, 0.503, 0.9, 0.997]),
)
def test_most_likely_tokens_among_equal_ones(logits, top_k, top_p):
    marked = jax.jit(most_likely)(jnp.array(logits), jnp.int32(top_k), jnp.float32(top_p))
    expected = distribution(logits, 1.0, top_k, top_p)
    np.testing.assert_array_equal(marked, expected > 0)


@given(
    logits=st.lists(st.integers(-30, 30), min_size=7, max_size=7, unique=True),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_only_allowed_tokens(logits, temperature, top_k, top_p):
    logits = np.array(logits) / 4
    expected = distribution(logits, temperature, top_k, top_p)
    assert set(draws(logits, 32, temperature, top_k, top_p)) <= set(np.flatnonzero(expected))


def greedy(run, prompt, count):
    """Step by step over `Run.logits`."""
    tokens = [run.tokenizer.bos_id, *run.tokenizer.encode(prompt)]
    start = len(tokens)
    while len(tokens) < min(start + count, CONTEXT + 1):
        padded = np.zeros(CONTEXT, int)
        padded[: len(tokens)] = tokens
        token = int(np.argmax(run.logits(padded)[len(tokens) - 1]))
        if token == run.tokenizer.bos_id:
            break
        tokens.append(token)
    return tuple(tokens[start:])


@pytest.mark.parametrize("prompt", ["", "b", "some é😀"])
def test_greedy_is_the_argmax(loaded, prompt):
    result = loaded.generate(prompt, temperature=0)
    assert result.tokens == greedy(loaded, prompt, CONTEXT)
    assert result.text == loaded.tokenizer.decode(result.tokens)
    # The most likely token alone is allowed, at any temperature.
    for limits in ({"top_k": 1}, {"top_p": 1e-6}):
        assert loaded.generate(prompt, temperature=5.0, **limits).tokens == result.tokens


def test_seeds(loaded):
    texts = [loaded.generate("b", seed=seed).tokens for seed in (0, 0, 1, 2**32 - 1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


PROMPTS = ["b", "", "some é😀", "0123456789abcde", "b"]


def test_prompts_of_a_batch(loaded):
    """A prompt's text depends on its place, not on its neighbours; each stops for itself."""
    together = loaded.generate_batch(PROMPTS, seed=5)
    others = loaded.generate_batch(["", "", "some é😀", "xyz"], seed=5)
    assert others[1:3] == together[1:3]
    assert loaded.generate("b", seed=5) == together[0] != together[4]
    greedy_texts = loaded.generate_batch(PROMPTS, temperature=0)
    assert [text.tokens for text in greedy_texts] == [greedy(loaded, p, CONTEXT) for p in PROMPTS]
    assert len(greedy_texts[3].tokens) <= 1
    assert loaded.generate_batch([]) == []
    assert loaded.generate_batch(PROMPTS, seed=5, batch_size=2) == together


def test_pieces_of_a_batch(loaded):
    pieces = {index: [] for index in range(len(PROMPTS))}
    results = loaded.generate_batch(PROMPTS, on_text=lambda index, text: pieces[index].append(text))
    assert ["".join(pieces[index]) for index in pieces] == [result.text for result in results]


def test_one_program_for_each_bucket(loaded):
    """Lengths of prompts and outputs, and all settings, share programs."""
    loaded.generate("b")
    programs = generate_lib.decode_programs(loaded.model)
    before = [program._cache_size() for program in programs]
    loaded.generate("bcd", max_tokens=3, temperature=0.5, top_k=3, top_p=0.9, seed=9)
    loaded.generate("bc", max_tokens=5)
    assert [program._cache_size() for program in programs] == before


def test_a_token_does_not_copy_the_cache():
    """The result aliases the donated state, and no temporary has the size of the cache."""
    model = small_model(num_blocks=4)
    params = random_params(model)
    shapes = model.cache_shapes(4, 4096)
    size = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    state = {
        "cache": shapes,
        "position": jax.ShapeDtypeStruct((), jnp.int32),
        "start": jax.ShapeDtypeStruct((4,), jnp.int32),
    }
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    settings = (jnp.float32(1), jnp.int32(0), jnp.float32(1))
    advance = generate_lib.decode_programs(model).advance
    tokens = jax.ShapeDtypeStruct((4,), jnp.int32)
    memory = (
        advance.lower((params, {}), state, tokens, 0, keys, settings).compile().memory_analysis()
    )
    assert memory.alias_size_in_bytes >= size
    # Some columns of one layer's keys and values at a time, for the products.
    assert memory.temp_size_in_bytes < 0.1 * size


def test_matrices_are_cast_once_and_not_for_every_token():
    """In bfloat16, which changes no number."""
    model = small_model(compute_dtype="bfloat16", feedforward__kind="moe")
    params = random_params(model)
    cast = model.decoding_params(params)
    narrow = jax.tree.map(lambda x: x.dtype == jnp.bfloat16, cast)
    assert narrow == jax.tree.map(lambda info: info.role == "matrix", model.infos)
    assert any(jax.tree.leaves(narrow))

    def logits(params):
        tokens, start = np.array([[1, 2, 3]]), np.zeros(1, np.int32)
        balance = model.initial_balance()
        first, state = model.prefill(params, tokens, start, 8, 0, balance)
        return first, model.decode_step(params, np.array([4]), state, 0, balance)[0]

    jax.tree.map(np.testing.assert_array_equal, logits(cast), logits(params))


def test_it_stops_where_it_says(loaded):
    whole = loaded.generate("b", temperature=0)
    assert whole.stop == "context" and len(whole.tokens) == CONTEXT + 1 - 2
    cut = loaded.generate("b", temperature=0, max_tokens=4)
    assert cut.stop == "max_tokens" and cut.tokens == whole.tokens[:4]
    exact = loaded.generate("b", temperature=0, max_tokens=CONTEXT - 1)
    assert (exact.stop, exact.tokens) == ("context", whole.tokens)
    last = loaded.generate("c" * (CONTEXT - 1), temperature=0)
    assert last.stop == "context" and len(last.tokens) == 1


class Scripted:
    """A model whose next token is always the next of a script."""

    vocab_size = 257

    def __init__(self, script):
        self.script = jnp.asarray(list(script), jnp.int32)

    def decoding_params(self, params):
        return params

    def prefill(self, params, tokens, start, length, step, balance):
        return self._next({"position": tokens.shape[1], "start": start})

    def decode_step(self, params, tokens, state, step, balance):
        return self._next(state | {"position": state["position"] + 1})

    def _next(self, state):
        place = state["position"] - state["start"] - 1  # after BOS, no prompt
        tokens = self.script[jnp.minimum(place, len(self.script) - 1)]
        return jax.nn.one_hot(tokens, self.vocab_size) * 50.0, state


def scripted(script, context=64, **options):
    pieces = []
    (result,) = generate(
        Scripted(script),
        {},
        {},
        ByteTokenizer(),
        [""],
        step=0,
        mesh=single_device_mesh(),
        context=context,
        on_text=lambda _, piece: pieces.append(piece),
        **options,
    )
    return result, pieces


def test_streamed_pieces_are_whole_characters():
    text = "aé😀—\x00b"
    result, pieces = scripted([*text.encode(), 256])
    assert result.text == text and result.stop == "document"
    assert pieces == list(text)
    # What never completes comes out at the end.
    result, pieces = scripted([*"a😀".encode()[:3], 256])
    assert pieces == ["a", "\ufffd"] and result.text == "a\ufffd"
    result, pieces = scripted(text.encode(), max_tokens=2)
    assert pieces == ["a", "\ufffd"] and result.stop == "max_tokens"


def test_a_document_that_ends_at_once():
    result, pieces = scripted([256])
    assert (result.text, result.tokens, result.stop, pieces) == ("", (), "document", [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**40}, "seed is 1099511627776"),
    ],
)
def test_settings_out_of_range(loaded, options, words):
    with pytest.raises(UserError, match=words):
        loaded.generate("b", **options)


def test_prompts_that_cannot_be_continued(loaded):
    with pytest.raises(UserError, match=r"17 tokens .* holds 16 \(data.row_length\)"):
        loaded.generate("c" * CONTEXT)
    with pytest.raises(UserError, match="the prompt: .*surrogate"):
        loaded.generate("\udcff")


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ("ab", {}, "prompts must be a list of texts, not one text"),
        (["a", None], {}, "the prompt is None; it must be text"),
        (["a"], {"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        (["a"], {"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        (["a"], {"seed": "1"}, "seed is '1'; it must be a whole number"),
        (["a"], {"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ],
)
def test_what_is_no_prompt_or_setting(loaded, prompts, options, words):
    with pytest.raises(UserError, match=words):
        loaded.generate_batch(prompts, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_are_no_numbers(loaded, temperature):
    """Not the first token of the vocabulary, again and again."""
    params = jax.tree.map(lambda leaf: leaf * np.nan, loaded.params)
    broken = dataclasses.replace(loaded, params=params)
    with pytest.raises(UserError, match="logits for token 1 after prompt 0 are not finite"):
        broken.generate("b", temperature=temperature)


def test_numbers_beyond_32_bits_mean_no_limit(loaded):
    expected = loaded.generate("b", max_tokens=3)
    assert loaded.generate("b", max_tokens=3, top_k=2**40).tokens == expected.tokens
    assert loaded.generate("b", max_tokens=2**40).stop == "context"


@pytest.mark.slow
@pytest.mark.parametrize("connection", ["nag", "prenorm"])
def test_padding_the_vocabulary_changes_nothing(connection):
    """Rows that pad the table take part in no loss and no sample, whatever they hold."""
    head = {} if connection == "nag" else {"connection__head": "free"}
    models = {
        multiple: small_model(
            vocab_size=257, connection__kind=connection, vocab_multiple=multiple, **head
        )
        for multiple in (1, 128)
    }
    params = random_params(models[1])
    table = params["table"]["rows"]
    junk = np.full((384 - 257, table.shape[1]), 3.0, np.float32)
    padded = {**params, "table": {"rows": np.concatenate([table, junk])}}
    batch = packed_batch([[9, 8], [5]], 16, vocab_size=257)
    results = []
    for multiple, values in ((1, params), (128, padded)):
        model = models[multiple]
        assert model.infos["table"]["rows"].shape[0] == len(values["table"]["rows"])
        out = jax.jit(lambda p, m=model: m.evaluate_batch(p, batch, 0, False)["nats"])(values)
        place = {"step": 0, "mesh": single_device_mesh(), "context": 16}
        texts = generate(model, values, {}, ByteTokenizer(), ["ab"] * 4, seed=3, **place)
        results.append((np.asarray(out), texts))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6, atol=1e-6)
    assert results[0][1] == results[1][1]
    assert max(len(text.tokens) for text in results[0][1]) > 5
