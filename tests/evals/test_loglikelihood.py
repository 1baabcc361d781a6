"""Log-likelihoods against `Run.logits` pair by pair: order, batches, encoding, truncation."""

import dataclasses

import jax
import numpy as np
import pytest
from small_models import random_params, small_config
from tokenizer_files import train_bpe

from nag_jax.data.tokenizers import ByteTokenizer
from nag_jax.errors import UserError
from nag_jax.evals import loglikelihood
from nag_jax.evals.loglikelihood import Scored, encode_pairs, first_scored
from nag_jax.models.transformer import build_model
from nag_jax.runs import Run
from nag_jax.sharding.mesh import single_device_mesh

pytestmark = pytest.mark.usefixtures("cached_compilation")

T = 160  # context of the random runs: rows of 64, 128 and 160
BOS = ByteTokenizer.bos_id


def random_run(tokenizer):
    config = small_config({"data.row_length": T}, attention__query_chunk=64, loss_chunk=0)
    model = build_model(config, tokenizer.vocab_size)
    params = jax.tree.map(lambda x: 2 * x, random_params(model))
    return Run(config, model, params, {}, tokenizer, 7, 7, single_device_mesh(), "", "")


@pytest.fixture(scope="module")
def run():
    return random_run(ByteTokenizer())


def expected(run, tokens, count):
    """Log-likelihood of the last `count` tokens, and whether all are likeliest, in float64."""
    padded = np.zeros(run.config.data.row_length, int)
    padded[: len(tokens) - 1] = tokens[:-1]
    logits = np.asarray(run.logits(padded), np.float64)[: len(tokens) - 1][-count:]
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    targets = np.asarray(tokens)[-count:]
    greedy = bool((logits.argmax(-1) == targets).all())
    return log_p[np.arange(count), targets].sum(), greedy


def assert_scored(run, scored, tokens, count, dropped=0):
    log_likelihood, greedy = expected(run, tokens, count)
    assert scored.log_likelihood == pytest.approx(log_likelihood, rel=1e-5, abs=1e-5)
    assert scored[1:] == (greedy, count, dropped)


def test_each_pair_in_the_order_asked(run):
    rng = np.random.default_rng(0)

    def text(length):
        return "".join(rng.choice(list("abcdefgh ijkl"), length)).strip() or "x"

    lengths = [(5, 3), (150, 9), (1, 1), (60, 3), (61, 3), (100, 40), (0, 4), (30, 100), (7, 3)]
    pairs = [(text(n) if n else "", text(m)) for n, m in lengths]
    result = run.loglikelihood(iter(pairs), batch_size=4)
    for (context, continuation), scored in zip(pairs, result, strict=True):
        assert_scored(
            run, scored, [BOS, *context.encode(), *continuation.encode()], len(continuation)
        )
        assert scored.log_likelihood < 0
    # Neither the batch's size nor the pairs beside one change its score.
    for size in (1, 3, 10**6):
        again = run.loglikelihood(pairs[::-1], batch_size=size)[::-1]
        assert [scored[1:] for scored in again] == [scored[1:] for scored in result]
        np.testing.assert_allclose(
            [scored.log_likelihood for scored in again],
            [scored.log_likelihood for scored in result],
            rtol=1e-5,
        )


def test_a_few_programs_serve_all(run):
    loglikelihood._scorer.cache_clear()
    for length in (1, 2, 30, 63, 64, 65, 100, 128, 129, 150, 159):
        run.loglikelihood([("a" * (length - 1), "b")] * 4, batch_size=4)
    assert loglikelihood._scorer(run.model, run.mesh)._cache_size() == 3


def test_greedy_decoding_gives_greedy_continuations(loaded):
    text = loaded.generate("b", temperature=0, max_tokens=5).text
    assert len(text) == 5 and text.isascii()
    others = [text[:i] + "~" + text[i + 1 :] for i in range(5)]
    result = loaded.loglikelihood([("b", continuation) for continuation in (text, *others)])
    assert [scored.greedy for scored in result] == [True] + [False] * 5
    assert all(scored.log_likelihood < result[0].log_likelihood for scored in result[1:])


def test_a_trained_run(loaded):
    result = loaded.loglikelihood([("ab", "cd"), ("", "ab")])
    for scored, tokens in zip(result, ([BOS, *b"abcd"], [BOS, *b"ab"]), strict=True):
        assert_scored(loaded, scored, tokens, 2)
    chain = loaded.loglikelihood([("", "abcd")])[0]
    total = sum(scored.log_likelihood for scored in result)
    assert chain.log_likelihood == pytest.approx(total, rel=1e-5)
    # The whole of a short text is what `evaluate` counts.
    nats = loaded.evaluate([("text", "abcd")]).document_nats[0]
    assert chain.log_likelihood == pytest.approx(-nats, rel=1e-5)


def test_lm_evaluation_harness_takes_the_first_two(loaded):
    (scored,) = loaded.loglikelihood([("a", "b")])
    log_likelihood, greedy = scored[:2]
    assert type(log_likelihood) is float and type(greedy) is bool
    assert isinstance(scored, Scored)


def test_white_space_moves_to_the_continuation(run):
    spaced = run.loglikelihood([("ab ", "cd"), ("ab", " cd"), (" \n", "cd"), ("", " \ncd")])
    assert spaced[0] == spaced[1] and spaced[0].tokens == 3
    assert spaced[2] == spaced[3] and spaced[2].tokens == 4


def test_texts_are_encoded_together():
    """A merge over the seam changes which tokens are scored."""
    run = random_run(train_bpe())
    tokenizer, bos = run.tokenizer, run.tokenizer.bos_id
    encode = tokenizer.encode
    # Whatever follows the context's own number of tokens.
    context, continuation = "the world wen", "t off the mat"
    whole = encode(context + continuation)
    assert whole != encode(context) + encode(continuation)
    count = len(whole) - len(encode(context))
    assert 0 < count < len(whole)
    (scored,) = run.loglikelihood([(context, continuation)])
    assert_scored(run, scored, [bos, *whole], count)
    # One token holds the end of one and all of the other, and nothing would follow: it is scored.
    whole = encode("on the")
    assert len(whole) == 2 < len(encode("on th"))
    (scored,) = run.loglikelihood([("on th", "e")])
    assert_scored(run, scored, [bos, *whole], 1)
    # One BOS; a text that is spelled like it is text.
    (scored,) = run.loglikelihood([("<|endoftext|>", " the cat")])
    whole = encode("<|endoftext|> the cat")
    assert bos not in whole
    assert_scored(run, scored, [bos, *whole], len(whole) - len(encode("<|endoftext|>")))


def test_where_the_continuation_begins():
    for whole, context, begin in (
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [], 0),
        ([1, 9, 3], [1, 2], 2),  # a token over the seam counts as context
        ([1, 9], [1, 2], 1),  # unless nothing else is left
        ([1, 9], [1, 2, 3, 4], 1),
        ([9], [1, 2], 0),
        ([1, 2], [1, 2], 2),  # no token is added
        ([1], [1, 2], 1),
        ([], [], 0),
    ):
        assert first_scored(whole, context) == begin


def test_long_contexts_lose_their_beginning_and_keep_bos(run):
    text = "".join(chr(97 + i % 26) for i in range(T + 50))
    for length in (T - 3, T - 2, T + 1, T + 50):
        (scored,) = run.loglikelihood([(text[-length:], "xyz")])
        dropped = max(0, length + 3 - T)
        seen = [BOS, *(text[-length:] + "xyz").encode()[dropped:]]
        assert len(seen) == min(length + 4, T + 1)
        assert_scored(run, scored, seen, 3, dropped)
    # A continuation that fills the context leaves BOS alone before it.
    (scored,) = run.loglikelihood([("gone", text[:T])])
    assert_scored(run, scored, [BOS, *text[:T].encode()], T, dropped=4)
    words = rf"pairs\[1\]: .* has {T + 1} tokens.* holds {T} .*row_length"
    with pytest.raises(UserError, match=words):
        run.loglikelihood([("a", "b"), ("a", text[: T + 1])])


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("a", ""), "the continuation is empty"),
        (("", ""), "the continuation is empty"),
        (("\ud800", "b"), "the context: the text has half of a surrogate pair"),
        (("a", "\udfff"), "the continuation: the text has half of a surrogate pair"),
        (("\ud83d", "\ude00"), "half of a surrogate pair"),
        (("a", None), r"is \('a', None\); it must be two strings, \(context, continuation\)"),
        ((b"a", "b"), "it must be two strings"),
        (("a",), "it must be two strings"),
        (("a", "b", "c"), "it must be two strings"),
        ("ab", "is 'ab'; it must be two strings"),
        (None, "is None; it must be two strings"),
    ],
)
def test_pairs_that_cannot_be_scored(run, pair, words):
    with pytest.raises(UserError, match=r"pairs\[1\].*" + words):
        run.loglikelihood([("a", "b"), pair])


def test_a_continuation_that_adds_no_token():
    class Trimming(ByteTokenizer):
        def encode_batch(self, texts):
            return super().encode_batch([text.rstrip() for text in texts])

    for pair in (("a", " "), ("", "\n")):
        with pytest.raises(UserError, match=r"pairs\[0\]: the continuation adds no token"):
            encode_pairs(Trimming(), [pair], T)


def test_other_arguments(run, capsys):
    assert run.loglikelihood([]) == []
    with pytest.raises(UserError, match="batch_size is 0; it must be at least 1"):
        run.loglikelihood([("a", "b")], batch_size=0)
    run.loglikelihood([["a", "b"]], progress=False)
    assert capsys.readouterr() == ("", "")


def test_gains_are_as_warm_as_they_were(run):
    """The steps behind the parameters count, as they do in `Run.logits`."""
    young = dataclasses.replace(run, age=0)
    (first,), (later,) = (r.loglikelihood([("abc", "def")]) for r in (young, run))
    assert_scored(young, first, [BOS, *b"abcdef"], 3)
    assert first.log_likelihood != pytest.approx(later.log_likelihood, rel=1e-3)
