"""Which attention implementation is chosen, and the fused ones' layout against the chunked one.

The splash kernel runs interpreted. `test_attention_compiles` compiles the kernels for the machines
that they are for.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.errors import UserError
from nag_jax.models import attention_kernels
from nag_jax.models.attention_kernels import Choice, UnsuitableKernel, attend, choose, splash
from nag_jax.models.chunked_attention import SAVED_NAMES, chunked_attention
from nag_jax.sharding.mesh import single_device_mesh

# (platform, dtype, width, packed, tokamax installed) -> (name, part of the reason)
TABLE = [
    ("cpu", "float32", 64, True, True, "chunked", "no fused kernel for CPU"),
    ("cpu", "bfloat16", 64, False, True, "chunked", "no fused kernel for CPU"),
    ("tpu", "bfloat16", 128, True, False, "splash", "fused"),
    ("tpu", "bfloat16", 58, True, False, "splash", "heads of 58 padded with zeros to 128"),
    ("tpu", "bfloat16", 66, False, False, "splash", "heads of 66 padded with zeros to 128"),
    ("tpu", "float32", 64, True, False, "chunked", "splash takes bfloat16"),
    ("gpu", "bfloat16", 64, False, False, "cudnn", "rows of one document"),
    ("gpu", "float16", 58, False, False, "cudnn", "heads of 58 padded with zeros to 64"),
    ("gpu", "bfloat16", 66, False, True, "cudnn", "heads of 66 padded with zeros to 72"),
    ("gpu", "bfloat16", 160, False, True, "tokamax", "rows of one document"),
    ("gpu", "bfloat16", 160, False, False, "chunked", "up to 128 wide on every GPU, not 160"),
    ("gpu", "bfloat16", 64, True, False, "chunked", "no document ids, and rows are packed"),
    ("gpu", "bfloat16", 64, True, True, "chunked", "tokamax isolates documents only by a mask"),
    ("gpu", "float32", 64, False, True, "chunked", "cudnn takes bfloat16 and float16, not float32"),
    ("gpu", "float32", 64, False, True, "chunked", "tokamax takes bfloat16 and float16, not flo"),
    ("METAL", "float32", 64, False, False, "chunked", "no fused kernel for METAL"),
]


@pytest.fixture
def installed(monkeypatch):
    """Sets whether tokamax counts as installed."""

    def set_to(present):
        spec = object() if present else None
        monkeypatch.setattr(attention_kernels.importlib.util, "find_spec", lambda name: spec)

    return set_to


@pytest.mark.parametrize("platform, dtype, width, packed, tokamax, name, reason", TABLE)
def test_auto(platform, dtype, width, packed, tokamax, name, reason, installed):
    installed(tokamax)
    choice = choose("auto", platform, head_dim=width, dtype=dtype, packed=packed)
    assert choice.name == name
    assert reason in choice.reason
    assert choice.fused == (name != "chunked")
    assert choice.row == ("attention", name, choice.reason)


@pytest.mark.parametrize("platform, dtype, width, packed, tokamax, name, reason", TABLE)
def test_strict_raises_where_auto_falls_back(
    platform, dtype, width, packed, tokamax, name, reason, installed
):
    installed(tokamax)
    ask = functools.partial(
        choose, "auto", platform, head_dim=width, dtype=dtype, packed=packed, strict=True
    )
    if name != "chunked":
        assert ask().name == name
        return
    with pytest.raises(UnsuitableKernel, match="model.strict_kernels") as raised:
        ask()
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    "name, platform, dtype, width, packed, reason",
    [
        ("splash", "cpu", "bfloat16", 64, True, "runs on TPU, not on CPU"),
        ("splash", "tpu", "float32", 64, True, "takes bfloat16"),
        ("cudnn", "tpu", "bfloat16", 64, False, "runs on GPU, not on TPU"),
        ("cudnn", "gpu", "bfloat16", 64, True, "takes no document ids"),
        ("cudnn", "gpu", "float32", 64, False, "takes bfloat16 and float16, not float32"),
        ("cudnn", "gpu", "bfloat16", 130, False, "up to 128 wide"),
        ("tokamax", "gpu", "bfloat16", 64, False, "is not installed"),
        ("flash", "gpu", "bfloat16", 64, False, "allowed: auto, chunked, splash, cudnn, tokamax"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused(
    name, platform, dtype, width, packed, reason, installed
):
    """Both kinds of exception: the command line prints it, a program may catch a ValueError."""
    installed(False)
    with pytest.raises(UserError, match=name) as raised:
        choose(name, platform, head_dim=width, dtype=dtype, packed=packed)
    assert isinstance(raised.value, ValueError)
    assert reason in str(raised.value)


def test_a_kernel_asked_for_is_taken():
    choice = choose("cudnn", "gpu", head_dim=64, dtype="bfloat16", packed=False, strict=True)
    assert choice == Choice("cudnn", "asked for; fused, rows of one document", True)
    choice = choose("chunked", "gpu", head_dim=64, dtype="bfloat16", packed=False, strict=True)
    assert choice.name == "chunked" and not choice.fused


def example(length, width, batch=2, kv_heads=2, group=2, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(batch, length, kv_heads, group, width))
    k, v = rng.normal(size=(2, batch, length, kv_heads, width))
    segment_ids = np.cumsum(rng.random((batch, length)) < 0.03, axis=1)
    c = rng.normal(size=q.shape)
    return *(jnp.asarray(x, dtype) for x in (q, k, v, c)), jnp.asarray(segment_ids, jnp.int32)


def value_and_gradients(attention, q, k, v, c):
    out, pull_back = jax.vjp(attention, q, k, v)
    return out, *pull_back(c)


def assert_close(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize(
    "length, width, packed", [(200, 58, True), (256, 66, False), (1, 128, True)]
)
def test_splash_equals_chunked(length, width, packed):
    """Values and gradients in float32, with heads and rows that fill no block."""
    q, k, v, c, segment_ids = example(length, width)
    segment_ids = segment_ids if packed else jnp.zeros_like(segment_ids)

    @jax.jit
    def run_splash(q, k, v, c):
        ids = segment_ids if packed else None
        return value_and_gradients(lambda *x: splash(*x, ids, interpret=True), q, k, v, c)

    @jax.jit
    def run_chunked(q, k, v, c):
        return value_and_gradients(lambda *x: chunked_attention(*x, segment_ids, 64), q, k, v, c)

    assert_close(run_splash(q, k, v, c), run_chunked(q, k, v, c), 1e-5)


@pytest.mark.parametrize("length", [1, 127, 128, 300, 511, 640, 2047, 2048, 2049, 5000])
def test_padding_of_rows_is_small(length):
    block = attention_kernels.splash_block(length)
    padded = length + -length % block
    assert block % 128 == 0
    assert padded <= max(length + 127, length + length // 8)


def dense(q, k, v, scale, is_causal):
    """Softmax attention of any dtype, called as `jax.nn.dot_product_attention` is."""
    assert is_causal
    q = q.reshape(*k.shape[:3], -1, q.shape[-1])
    logits = scale * jnp.einsum("btkgh,bskh->bkgts", q, k)
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, -jnp.inf)
    out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(logits, axis=-1), v)
    return out.reshape(*q.shape[:2], -1, q.shape[-1])


@pytest.mark.parametrize("width, multiple", [(58, 8), (66, 8), (58, 128), (66, 128), (88, 8)])
def test_padding_of_heads_is_exact(width, multiple, x64):
    """Values and gradients to float64's rounding: the scale stays that of the true width."""
    q, k, v, c, _ = example(17, width, dtype=jnp.float64)
    one_document = jnp.zeros((2, 17), jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, q, k, v, c):
        return value_and_gradients(attention, q, k, v, c)

    def padded(q, k, v):
        return attention_kernels._dot_product(dense, multiple, q, k, v, None)

    def plain(q, k, v):
        return chunked_attention(q, k, v, one_document, 64)

    assert_close(run(padded, q, k, v, c), run(plain, q, k, v, c), 1e-13)


@jax.custom_vjp
def fake_kernel(q, k, v, scale, is_causal):
    """Stands for a fused kernel: one `erf` marks its forward pass, whose statistics it keeps."""
    return jax.lax.erf(q) + k + v


fake_kernel.defvjp(
    lambda q, k, v, scale, is_causal: ((out := jax.lax.erf(q) + k + v), (q, k, v, out, out.sum())),
    lambda kept, c: (*(kept[3] + kept[4] + c + x for x in kept[:3]), None, None),
)


def test_remat_keeps_the_outputs_of_kernels():
    """With the policy's names the backward pass has no second forward pass; without, it has one."""
    q, k, v, _, _ = example(16, 8, group=1)

    def block(q, k, v):
        out = attention_kernels._dot_product(fake_kernel, 8, 2 * q, 2 * k, 2 * v, None)
        return jnp.sum(jnp.square(out))

    def forward_passes(names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        gradients = jax.grad(jax.checkpoint(block, policy=policy), (0, 1, 2))
        return str(jax.make_jaxpr(gradients)(q, k, v)).count(" erf ")

    assert forward_passes(SAVED_NAMES) == 1
    assert forward_passes(()) == 2


def test_attend_on_cpu_is_chunked():
    q, k, v, _, segment_ids = example(40, 8)
    auto = functools.partial(attend, implementation="auto", chunk=16, packed=True)
    plain = jax.jit(functools.partial(chunked_attention, chunk=16))(q, k, v, segment_ids)
    np.testing.assert_array_equal(jax.jit(auto)(q, k, v, segment_ids), plain)
    with pytest.raises(UnsuitableKernel, match="runs on TPU, not on CPU"):
        auto(q, k, v, segment_ids, implementation="splash")


@pytest.mark.parametrize("packed", [True, False])
def test_attend_runs_the_choice_on_each_device(packed, monkeypatch):
    """A TPU's choice, interpreted: the same with a mesh and without, and chunked to bfloat16."""
    q, k, v, c, segment_ids = example(40, 8, dtype=jnp.bfloat16)
    segment_ids = segment_ids if packed else jnp.zeros_like(segment_ids)
    interpreted = attention_kernels.KERNELS["splash"]._replace(
        run=functools.partial(splash, interpret=True)
    )
    monkeypatch.setitem(attention_kernels.KERNELS, "splash", interpreted)
    monkeypatch.setattr(attention_kernels, "platform_in_use", lambda: "tpu")

    def run(implementation):
        def attention(q, k, v):
            return attend(
                q, k, v, segment_ids, implementation=implementation, chunk=16, packed=packed
            )

        return jax.jit(functools.partial(value_and_gradients, attention))(q, k, v, c)

    alone = run("auto")
    with jax.set_mesh(single_device_mesh()):
        meshed = run("auto")
    for a, b in zip(alone, meshed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_close(alone, run("chunked"), 2e-2)


def test_tokamax_equals_chunked(monkeypatch):
    """Its GPU kernels give way to the one of its implementations that runs here."""
    tokamax = pytest.importorskip("tokamax")
    monkeypatch.setattr(sys, "argv", ["test"])  # it reads the command line where nobody has
    real = tokamax.dot_product_attention

    def on_cpu(*arguments, implementation, **options):
        assert implementation == ("mosaic", "triton")
        return real(*arguments, implementation="xla_chunked", **options)

    monkeypatch.setattr(tokamax, "dot_product_attention", on_cpu)
    q, k, v, c, _ = example(40, 58)
    one_document = jnp.zeros((2, 40), jnp.int32)
    got = value_and_gradients(lambda *x: attention_kernels.tokamax(*x, None), q, k, v, c)
    plain = value_and_gradients(lambda *x: chunked_attention(*x, one_document, 64), q, k, v, c)
    assert_close(got, plain, 1e-5)
