"""The norm-agnostic update against float64 NumPy, its invariants, and its gradients."""

import functools
from types import SimpleNamespace as Namespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nag_jax.validation import RULES
from pallas_kernels import ccgqa_mixing, nag_update, platform
from pallas_kernels.nag_update import (
    IMPLEMENTATIONS,
    choose,
    mosaic_gpu,
    pallas_triton,
    triton_call,
)
from pallas_kernels.nag_update.dispatch import KERNELS

DELTA, TINY = 1e-5, 1e-20
SHAPES = [(3,), (1, 5), (300, 5), (2, 7, 64), (4, 257)]
DTYPES = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 1.5e-2}


def marks(name):
    """Of the kernels, that for TPU is enough for the quick suite."""
    found = [pytest.mark.slow] * (name not in ("reference", "mosaic_tpu"))
    if name == "triton":  # run by `test_gpu_kernels` where it can be
        refusal = KERNELS[name].interpreter_refusal()
        found.append(pytest.mark.skipif(bool(refusal), reason=f"triton {refusal}"))
    return found


EACH = [pytest.param(name, marks=marks(name)) for name in IMPLEMENTATIONS]
# float64 is the definition's alone.
EACH_DTYPE = [
    pytest.param(name, dtype, marks=marks(name))
    for name in IMPLEMENTATIONS
    for dtype in DTYPES
    if name == "reference" or dtype != "float64"
]


@pytest.fixture(autouse=True)
def interpreted_all_the_same(monkeypatch):
    """Here there is one device, and remat in one test that does without this kernel."""
    kernel = KERNELS["mosaic_gpu"]._replace(interpreter_refusal=lambda: "")
    monkeypatch.setitem(KERNELS, "mosaic_gpu", kernel)


def unit_update(r, f):
    """u = sqrt(d) f_perp/|f_perp| of equations (10) and (12), and q = |u|^2/d, in float64.

    Where the branch is almost parallel or zero u is shortened by the two floors.
    """
    d = r.shape[-1]
    f = f - np.sum(f, axis=-1, keepdims=True) / d
    share = np.sum(f * r, axis=-1, keepdims=True) / np.sum(r * r, axis=-1, keepdims=True)
    f_perp = f - share * r
    length_sq = np.sum(f_perp**2, axis=-1, keepdims=True)
    length_sq = length_sq + DELTA**2 * np.sum(f**2, axis=-1, keepdims=True) + TINY
    u = np.sqrt(d) * f_perp / np.sqrt(length_sq)
    return u, np.sum(u * u, axis=-1) / d


def expected_update(r, f, a):
    """Equations (14), (15) and (17), without the pass-through at gain 0."""
    u, q = unit_update(r, f)
    written = r + a[..., None] * u
    norm = np.sqrt(np.sum(written**2, axis=-1, keepdims=True))
    return np.sqrt(r.shape[-1]) * written / norm, 0.5 * np.log(1 + a**2 * q)


def example(shape, seed=0, branch_rms=1.0, gain=None):
    """(direction, branch, gain) in float64: unit RMS and zero mean, a mean of 0.5, mixed gains."""
    rng = np.random.default_rng(seed)
    r = rng.normal(size=shape)
    r = r - r.mean(axis=-1, keepdims=True)
    r = r / np.sqrt(np.mean(r * r, axis=-1, keepdims=True))
    f = branch_rms * (0.5 + 0.3 * r + rng.normal(size=shape))
    a = rng.uniform(0.05, 2.0, size=shape[:-1]) if gain is None else np.full(shape[:-1], gain)
    return r, f, a


def rounded(arrays, dtype):
    """The arrays in `dtype`, and what float64 makes of exactly those values."""
    cast = tuple(jnp.asarray(x, dtype) for x in arrays)
    return cast, tuple(np.asarray(x, np.float64) for x in cast)


@functools.partial(jax.jit, static_argnames="implementation")
def pulled_back(r, f, a, c_r, c_s, implementation):
    out, pull_back = jax.vjp(functools.partial(nag_update, implementation=implementation), r, f, a)
    return out, pull_back((c_r, c_s))


def update_and_gradients(inputs, cotangents, implementation):
    """(outputs, gradients) for cotangents of both outputs, cast to the outputs' dtypes."""
    statistics = jnp.promote_types(inputs[0].dtype, jnp.float32)
    c_r, c_s = cotangents
    c_r, c_s = jnp.asarray(c_r, inputs[0].dtype), jnp.asarray(c_s, statistics)
    return pulled_back(*inputs, c_r, c_s, implementation)


def expected_gradients(inputs, cotangents):
    """Gradients by central differences of the float64 NumPy formula, entry by entry."""

    def loss(arrays):
        out, growth = expected_update(*arrays)
        return np.sum(out * cotangents[0], axis=-1) + growth * cotangents[1]

    gradients = []
    for which, array in enumerate(inputs):
        per_token = array if array.ndim == inputs[0].ndim else array[..., None]
        size = 1e-5 * np.sqrt(np.mean(per_token**2, axis=-1)) + 1e-300
        columns = []
        for column in range(per_token.shape[-1]):
            values = []
            for sign in (1, -1):
                moved = per_token.copy()
                moved[..., column] += sign * size
                values.append(
                    loss([*inputs[:which], moved.reshape(array.shape), *inputs[which + 1 :]])
                )
            columns.append((values[0] - values[1]) / (2 * size))
        gradients.append(np.stack(columns, axis=-1).reshape(array.shape))
    return gradients


def assert_close(actual, expected, tolerance):
    """Equal relative to the largest entry along the last axis."""
    error = np.abs(np.asarray(actual, np.float64) - expected)
    limit = tolerance * np.max(np.abs(expected), axis=-1, keepdims=True) + 1e-30
    assert np.all(error <= limit), np.max(error / limit) * tolerance


@pytest.mark.parametrize("implementation, dtype", EACH_DTYPE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, implementation, x64):
    tolerance = DTYPES[dtype]
    inputs, exact = rounded(example(shape), dtype)
    rng = np.random.default_rng(1)
    cotangents, exact_cotangents = rounded(
        (rng.normal(size=shape), rng.normal(size=shape[:-1])), dtype
    )
    (out, growth), gradients = update_and_gradients(inputs, cotangents, implementation)
    assert out.dtype == inputs[0].dtype
    assert growth.dtype == jnp.promote_types(dtype, jnp.float32)
    expected, expected_growth = expected_update(*exact)
    assert_close(out, expected, tolerance)
    np.testing.assert_allclose(growth, expected_growth, rtol=1e-5, atol=1e-6)
    for got, wanted, given_ in zip(
        gradients, expected_gradients(exact, exact_cotangents), inputs, strict=True
    ):
        assert got.dtype == given_.dtype
        # In d = 3 the branch only chooses a sign: its gradient is 0 where others are near 1.
        limit = max(2 * tolerance, 1e-7)
        scale = max(1, np.abs(wanted).max())
        np.testing.assert_allclose(
            np.asarray(got, np.float64), wanted, rtol=limit, atol=limit * scale
        )


@pytest.mark.parametrize("implementation, dtype", EACH_DTYPE)
@pytest.mark.parametrize("branch_rms", [1e-8, 6e-3, 1e-3, 1e3])
def test_the_scale_of_the_branch_is_irrelevant(branch_rms, dtype, implementation, x64):
    """Equal to the paper's own equations, without floors, at any branch scale."""
    inputs, (r, f, a) = rounded(example((6, 64), branch_rms=branch_rms), dtype)
    out, growth = nag_update(*inputs, implementation=implementation)
    f = f - f.mean(axis=-1, keepdims=True)
    f_perp = f - np.sum(f * r, -1, keepdims=True) / np.sum(r * r, -1, keepdims=True) * r
    u = 8.0 * f_perp / np.linalg.norm(f_perp, axis=-1, keepdims=True)
    written = r + a[:, None] * u
    expected = 8.0 * written / np.linalg.norm(written, axis=-1, keepdims=True)
    assert_close(out, expected, max(DTYPES[dtype], 1e-6))
    np.testing.assert_allclose(growth, 0.5 * np.log(1 + a**2), rtol=1e-5)


@pytest.mark.parametrize("implementation, dtype", EACH_DTYPE)
@pytest.mark.parametrize("gain", [0.0, 1e-6, 1.0, 1e4])
@pytest.mark.parametrize("branch", ["zero", "constant", "parallel", "tiny"])
def test_degenerate_branches(branch, gain, dtype, implementation, x64):
    """A branch that says nothing new changes nothing, is credited nothing and harms no gradient."""
    r, f, a = example((4, 64), gain=gain, branch_rms=1e-30)
    if branch != "tiny":
        f = {"zero": 0 * r, "constant": 0 * r + 2.0, "parallel": -3.0 * r}[branch]
    inputs, exact = rounded((r, f, a), dtype)
    cotangents, _ = rounded((example((4, 64), seed=1)[0], np.ones(4)), dtype)
    (out, growth), gradients = update_and_gradients(inputs, cotangents, implementation)
    for x in (out, growth, *gradients):
        assert np.all(np.isfinite(np.asarray(x, np.float64)))
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(np.mean(out**2, axis=-1), 1, rtol=DTYPES[dtype])
    # bfloat16 directions have means of rounding size, so that a centred parallel branch is not
    # parallel; and a gain of 10^4 magnifies what is left of float32's rounding.
    if gain <= 1 and not (branch == "parallel" and dtype == "bfloat16"):
        assert_close(out, exact[0], {"float64": 1e-6, "float32": 3e-2, "bfloat16": 1e-2}[dtype])
        assert np.max(np.asarray(growth)) < 1e-3
    assert np.all(growth >= 0)
    if branch in ("zero", "constant") and dtype != "bfloat16":
        np.testing.assert_array_equal(growth, 0)


@pytest.mark.parametrize("implementation", EACH)
def test_a_huge_gain_replaces_the_direction(implementation, x64):
    r, f, a = example((5, 64), gain=1e12)
    out, growth = nag_update(*map(jnp.asarray, (r, f, a)), implementation=implementation)
    np.testing.assert_allclose(out, unit_update(r, f)[0], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(growth, np.log(1e12), rtol=1e-8)


@pytest.mark.parametrize("implementation, dtype", EACH_DTYPE)
def test_gain_zero_passes_bit_for_bit_and_still_learns(dtype, implementation, x64):
    """Untouched, also beside other tokens, while the gain's gradient is <cotangent, u>."""
    r, f, a = example((64, 33))
    a[::2] = 0
    inputs, exact = rounded((r, f, a), dtype)
    cotangent = np.random.default_rng(2).normal(size=r.shape)
    (cotangent,), (exact_cotangent,) = rounded((cotangent,), dtype)
    (out, growth), gradients = update_and_gradients(
        inputs, (cotangent, np.ones(64)), implementation
    )
    np.testing.assert_array_equal(out[::2], inputs[0][::2])
    np.testing.assert_array_equal(growth[::2], 0)
    assert np.all(np.any(np.asarray(out[1::2] != inputs[0][1::2]), axis=-1))

    u, _ = unit_update(*exact[:2])
    norm = np.sqrt(np.mean(exact[0] ** 2, axis=-1))
    slope = np.sum(exact_cotangent * u, axis=-1) / norm
    assert_close(gradients[2][::2], slope[::2], max(10 * DTYPES[dtype], 1e-9))
    assert np.all(np.abs(slope) > 0)
    # The branch learns nothing at gain 0, and the direction passes through the renormalisation.
    np.testing.assert_array_equal(np.asarray(gradients[1][::2], np.float32), 0)
    along = np.sum(exact_cotangent * exact[0], axis=-1, keepdims=True) / 33 / norm[:, None] ** 2
    passed = (exact_cotangent - along * exact[0]) / norm[:, None]
    assert_close(gradients[0][::2], passed[::2], max(DTYPES[dtype], 1e-9))


@given(
    width=st.sampled_from([3, 5, 64]),
    seed=st.integers(0, 2**31),
    log_scale=st.floats(-6, 6),
    gain=st.floats(1e-3, 1e3),
)
def test_invariants(width, seed, log_scale, gain):
    """Norm sqrt(d), zero mean, orthogonal written update, and equation (15)."""
    with jax.enable_x64(True):
        r, f, a = example((4, width), seed, branch_rms=10.0**log_scale, gain=gain)
        out, growth = map(np.asarray, nag_update(*map(jnp.asarray, (r, f, a))))
        twice = nag_update(*map(jnp.asarray, (r, 7.0 * f + 3.0 * 10**log_scale, a)))
    np.testing.assert_allclose(np.linalg.norm(out, axis=-1), np.sqrt(width), rtol=1e-12)
    np.testing.assert_allclose(out.mean(axis=-1), 0, atol=1e-9)
    # Undoing the renormalisation by the growth of the log-norm gives the written state R + a u.
    written = out * np.exp(growth)[:, None]
    update = written - r
    size = np.linalg.norm(update, axis=-1)
    np.testing.assert_allclose(size, gain * np.sqrt(width), rtol=1e-5)
    np.testing.assert_allclose(np.sum(update * r, axis=-1) / (size * np.sqrt(width)), 0, atol=1e-6)
    u, _ = unit_update(r, f)
    norm_growth = np.linalg.norm(r + a[:, None] * u, axis=-1) / np.sqrt(width)
    np.testing.assert_allclose(growth, np.log(norm_growth), rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(twice[0], out, atol=1e-6)
    np.testing.assert_allclose(twice[1], growth, rtol=1e-6)


@pytest.mark.parametrize("implementation", EACH[1:])
def test_works_under_jit_vmap_scan_and_checkpoint(implementation):
    """Values and gradients, also of tokens whose axes do not fill a tile."""
    update = functools.partial(nag_update, implementation=implementation)
    inputs = [jnp.asarray(x, jnp.float32) for x in example((3, 19, 16))]

    def loss(how):
        return lambda *arrays: sum(jnp.sum(jnp.sin(x)) for x in how(*arrays))

    ways = {
        "plain": update,
        "jit": jax.jit(update),
        "vmap": jax.vmap(update),
        "scan": lambda *arrays: jax.lax.scan(lambda c, xs: (c, update(*xs)), None, arrays)[1],
        "checkpoint": jax.checkpoint(update),
    }
    if implementation == "mosaic_gpu":  # see its `interpreter_refusal`
        del ways["checkpoint"]
    expected = jax.value_and_grad(loss(nag_update), (0, 1, 2))(*inputs)
    for name, way in ways.items():
        got = jax.value_and_grad(loss(way), (0, 1, 2))(*inputs)
        jax.tree.map(
            lambda x, y, name=name: np.testing.assert_allclose(
                x, y, rtol=1e-4, atol=1e-5, err_msg=name
            ),
            got,
            expected,
        )


@pytest.mark.parametrize("implementation", EACH)
def test_a_token_that_is_not_finite_stays_alone(implementation):
    inputs = [jnp.asarray(x, jnp.float32) for x in example((7, 24))]
    broken = [x.at[3].set(jnp.nan) for x in inputs]
    cotangents = (inputs[1], jnp.ones(7))
    whole = update_and_gradients(inputs, cotangents, implementation)
    for got, wanted in zip(
        jax.tree.leaves(update_and_gradients(broken, cotangents, implementation)),
        jax.tree.leaves(whole),
        strict=True,
    ):
        others = np.arange(7) != 3
        np.testing.assert_array_equal(got[others], wanted[others])
        assert np.all(np.isnan(got[3]))


def test_implementations_are_named():
    def chosen(name, platform="tpu", width=64, dtype="bfloat16"):
        return choose(name, platform, width=width, dtypes=("float32", dtype))

    assert chosen("auto") == ("mosaic_tpu", "fused, forward and backward")
    assert chosen("mosaic_tpu") == ("mosaic_tpu", "asked for")
    assert chosen("mosaic_tpu", "cpu") == ("mosaic_tpu", "asked for; interpreted on CPU, slow")
    assert chosen("reference")[0] == "reference"
    name, reason = chosen("auto", "cpu")
    assert name == "reference" and reason.startswith("no fused kernel for CPU")
    name, reason = chosen("auto", dtype="float64")
    assert name == "reference" and "not float64" in reason
    name, reason = chosen("auto", width=2**17)
    assert name == "reference" and "no room for tokens of width 131072" in reason
    with pytest.raises(ValueError, match="'mosaic_tpu' of nag_update takes float32"):
        chosen("mosaic_tpu", dtype="float64")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'.*auto, reference"):
        nag_update(jnp.ones(3), jnp.ones(3), jnp.ones(()), implementation="cuda")
    with pytest.raises(ValueError, match=r"not \(2, 3\), \(2, 3\) and \(\)"):
        nag_update(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones(()))


def test_gpus_have_three_kernels(monkeypatch):
    """In the order of `KERNELS`, and each says why it does not serve."""

    def chosen(name="auto", platform="gpu", width=1024):
        return choose(name, platform, width=width, dtypes=("bfloat16", "bfloat16"))

    assert chosen() == ("pallas_triton", "fused, forward and backward")
    name, reason = chosen(width=8320)
    assert name == "reference"
    for kernel in ("pallas_triton", "mosaic_gpu", "triton"):
        assert f"{kernel} has no room for tokens of width 8320" in reason
    assert chosen("mosaic_gpu") == ("mosaic_gpu", "asked for")
    with pytest.raises(ValueError, match="'mosaic_gpu' of nag_update takes .*128, not 1000"):
        chosen("mosaic_gpu", width=1000)

    # A JAX without Pallas' lowering through Triton, on Hopper and on an older GPU.
    monkeypatch.setattr(pallas_triton, "plgpu", None)
    assert chosen() == ("mosaic_gpu", "fused, forward and backward")
    monkeypatch.setattr(mosaic_gpu.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic_gpu.jax, "devices", lambda: [Namespace(compute_capability="8.0")])
    monkeypatch.setattr(triton_call, "_missing", lambda: "needs jax-triton")
    name, reason = chosen()
    assert name == "reference"
    assert "pallas_triton needs an older JAX" in reason
    assert "mosaic_gpu needs a GPU of the Hopper generation" in reason
    assert "triton needs jax-triton" in reason


def test_a_config_may_name_each():
    allowed = RULES["model.connection.implementation"].words
    assert allowed == f"one of {', '.join(('auto', *IMPLEMENTATIONS))}"


@pytest.mark.parametrize(
    "kind, name",
    [("TPU v4", "reference"), ("TPU v5 lite", "mosaic_tpu"), ("TPU v6e", "mosaic_tpu")],
)
def test_old_tpus_have_no_kernel(kind, name, monkeypatch):
    monkeypatch.setattr(platform, "_abstract_device", lambda: Namespace(device_kind=kind))
    assert choose("auto", "tpu", width=64, dtypes=("float32",))[0] == name
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 80, "kernels": (2, 2)}
    assert ccgqa_mixing.choose("auto", "tpu", **sizes, dtype="float32")[0] == name


@pytest.mark.parametrize("implementation", EACH)
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
def test_direction_and_branch_of_different_dtypes(dtypes, implementation):
    r, f, a = (jnp.asarray(x, jnp.float32) for x in example((5, 40)))
    r, f = (x.astype(dtype) for x, dtype in zip((r, f), dtypes, strict=True))
    cotangents = (f.astype(jnp.float32), jnp.ones(5))
    got = update_and_gradients((r, f, a), cotangents, implementation)
    wanted = update_and_gradients((r, f, a), cotangents, "reference")
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize("implementation", EACH)
def test_no_tokens(implementation):
    inputs = (jnp.ones((2, 0, 8)), jnp.ones((2, 0, 8)), jnp.ones((2, 0)))
    (out, growth), gradients = update_and_gradients(inputs, inputs[1:], implementation)
    assert out.shape == (2, 0, 8) and growth.shape == (2, 0)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
