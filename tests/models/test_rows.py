"""Sorted rows and grouped products against NumPy in float64, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.models import rows
from nag_jax.models.grouped_gradient import weight_gradient
from nag_jax.models.linear import GROUPED_PRODUCT, Numerics, contract_grouped

# Name: rows in all, sizes of the groups.
CASES = {
    "one group": (40, [40]),
    "empty groups": (37, [0, 20, 0, 0, 17, 0]),
    "one hot group": (700, [0, 700, 0, 0]),
    "one row": (1, [0, 0, 1, 0]),
    "no rows of any group": (9, [0, 0, 0]),
    "rows past the total": (75, [11, 0, 30, 1]),
    "odd sizes over whole blocks": (1333, [513, 1, 127, 160, 532]),
    "rows past the total, over whole blocks": (1500, [600, 33, 0, 545]),
    "one row each": (33, [1] * 33),
}


def expected_product(x, w, sizes, d_y):
    """Product, gradient of rows and gradient of weights, rows past the total left zero."""
    x, w, d_y = (np.asarray(array, np.float64) for array in (x, w, d_y))
    y, d_x, d_w = np.zeros(d_y.shape), np.zeros(x.shape), np.zeros(w.shape)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    for group, (first, last) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        y[first:last] = x[first:last] @ w[group]
        d_x[first:last] = d_y[first:last] @ w[group].T
        d_w[group] = x[first:last].T @ d_y[first:last]
    return y, d_x, d_w


def product_and_gradients(x, w, sizes, d_y, implementation):
    @jax.jit
    def run(x, w, sizes, d_y):
        y, pull_back = jax.vjp(lambda x, w: rows.grouped_matmul(x, w, sizes, implementation), x, w)
        return y, *pull_back(d_y)

    return run(x, w, jnp.asarray(sizes, jnp.int32), d_y)


def inputs(total, sizes, dtype, widths=(24, 40)):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(total, widths[0]))
    w = rng.normal(size=(len(sizes), *widths)) / np.sqrt(widths[0])
    d_y = rng.normal(size=(total, widths[1]))
    x[sum(sizes) :], d_y[sum(sizes) :] = np.nan, np.inf  # must not matter
    return (jnp.asarray(array, dtype) for array in (x, w, d_y))


@pytest.mark.parametrize(
    "case, dtype, implementation",
    [(case, "float32", "blocked") for case in CASES]
    + [("odd sizes over whole blocks", "bfloat16", "blocked")]
    + [("rows past the total", dtype, "ragged_dot") for dtype in ("float32", "bfloat16")],
)
def test_grouped_matmul(case, dtype, implementation):
    total, sizes = CASES[case]
    x, w, d_y = inputs(total, sizes, dtype)
    got = product_and_gradients(x, w, sizes, d_y, implementation)
    tolerance = 2e-6 if dtype == "float32" else 1e-2
    for array, want in zip(got, expected_product(x, w, sizes, d_y), strict=True):
        assert array.dtype == dtype
        array = np.asarray(array, np.float64)
        assert np.abs(array - want).max() <= tolerance * max(np.abs(want).max(), 1)
    for array in got[:2]:
        assert not np.asarray(array, np.float32)[sum(sizes) :].any()


@pytest.mark.parametrize(
    "case, widths",
    [(case, (24, 40)) for case in CASES]
    + [("rows past the total, over whole blocks", (700, 1300))],  # several tiles
)
def test_weight_gradient_of_the_kernel_for_tpu(case, widths):
    total, sizes = CASES[case]
    x, _, d_y = inputs(total, sizes, "bfloat16", widths)
    got = weight_gradient(x, d_y, jnp.asarray(sizes, jnp.int32), interpret=True)
    wanted = expected_product(x, np.zeros((len(sizes), *widths)), sizes, d_y)[2]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(got, np.float64), wanted, rtol=2**-7, atol=1e-5 * total, err_msg=case
    )


def test_cost_follows_the_sizes(monkeypatch):
    """Each block of rows is multiplied once, and groups without rows not at all."""
    blocks = []
    monkeypatch.setattr(
        jax.lax, "fori_loop", lambda first, last, body, carry: _loop(blocks, last, body, carry)
    )
    x = jnp.ones((1300, 4))
    sizes = jnp.asarray([0, 700, 0, 33, 0])
    rows._blocked_product(x, jnp.ones((5, 4, 6)), sizes)
    assert blocks == [2, 1, 1, 2, 0, 0, 2]


def _loop(counts, last, body, carry):
    counts.append(int(last))
    for i in range(int(last)):
        carry = body(jnp.asarray(i), carry)
    return carry


def test_memory_does_not_grow_with_experts():
    temporaries = {}
    for experts in (4, 32):
        x, w, d_y = inputs(4096, [4096 // experts] * experts, "float32", (64, 128))

        def both(x, w, sizes, d_y):
            y, pull_back = jax.vjp(lambda x, w: rows.grouped_matmul(x, w, sizes, "blocked"), x, w)
            return y, *pull_back(d_y)

        sizes = jnp.full(experts, 4096 // experts)
        compiled = jax.jit(both).lower(x, w, sizes, d_y).compile()
        temporaries[experts] = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries[32] < 1.1 * temporaries[4]


@pytest.mark.parametrize("k", [1, 3])
def test_sorting_and_gathering(k):
    """Stable; nowhere last; the gradient of each token is the sum over its rows."""
    rng = np.random.default_rng(1)
    tokens, experts = 29, 5
    groups = rng.integers(0, experts + 1, (tokens * k,))
    sorting = jax.jit(rows.sort_by_group, static_argnums=1)(jnp.asarray(groups), experts)
    order = np.argsort(groups, kind="stable")
    np.testing.assert_array_equal(sorting.order, order)
    np.testing.assert_array_equal(np.asarray(sorting.places)[order], np.arange(tokens * k))
    np.testing.assert_array_equal(
        sorting.group_sizes, np.bincount(groups, minlength=experts + 1)[:experts]
    )
    x = jnp.asarray(rng.normal(size=(tokens, 7)), jnp.float32)
    weights = rng.normal(size=(tokens * k, 7))

    def loss(x):
        return (rows.gather_rows(x, sorting.order, sorting.places) * weights).sum()

    np.testing.assert_array_equal(
        rows.gather_rows(x, sorting.order, sorting.places), np.asarray(x)[order // k]
    )
    d_x = np.zeros((tokens, 7))
    np.add.at(d_x, order // k, weights)
    np.testing.assert_allclose(jax.grad(loss)(x), d_x, rtol=1e-5, atol=1e-6)
    assert "scatter" not in jax.jit(jax.grad(loss)).lower(x).as_text()


def test_gathering_rows_of_a_numpy_array():
    """As they come outside of a trace, from a restored checkpoint say."""
    x, order = np.eye(3, dtype=np.float32), np.array([2, 0, 1], np.int32)
    places = np.argsort(order).astype(np.int32)
    np.testing.assert_array_equal(rows.gather_rows(x, order, places), x[order])
    np.testing.assert_array_equal(rows.collect_rows(x[order], order, places), x)


def test_choices():
    def auto(platform, dtype="bfloat16", strict=False):
        return rows.choose("auto", platform, dtype=dtype, strict=strict)

    assert auto("tpu").name == "ragged_dot" == auto("tpu", "float32", strict=True).name
    assert auto("cpu").row == ("grouped matmul", "blocked", "no fused kernel for CPU")
    assert rows.choose("blocked", "tpu", dtype="float32", strict=True).name == "blocked"
    assert rows.choose("ragged_dot", "tpu", dtype="float32").reason.endswith("grouped kernel")
    assert "every expert" in rows.choose("ragged_dot", "cpu", dtype="float32").reason
    with pytest.raises(rows.UnsuitableImplementation, match="strict_kernels"):
        auto("cpu", strict=True)
    with pytest.raises(rows.UnsuitableImplementation, match="runs on GPU, not on CPU"):
        rows.choose("tokamax", "cpu", dtype="bfloat16")
    with pytest.raises(rows.UnsuitableImplementation, match="allowed: auto, blocked"):
        rows.choose("dense", "cpu", dtype="bfloat16")


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_tokamax_serves_gpu_where_it_and_one_are_there(installed, attached, monkeypatch):
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if attached else "cpu")
    choice = rows.choose("auto", "gpu", dtype="bfloat16")
    assert choice.name == ("tokamax" if installed and attached else "blocked")
    if installed and not attached:  # such as where a plan is compiled
        assert "no GPU is attached" in choice.reason
    assert rows.choose("auto", "gpu", dtype="float32").name == "blocked"


def test_contract_grouped_multiplies_in_the_compute_dtype_and_names_its_product():
    x, w, _ = inputs(20, [7, 13], "float32")
    sizes = jnp.asarray([7, 13])

    def run(x):
        return contract_grouped("moe/up", x, w, sizes, Numerics("bfloat16"), "blocked")

    assert run(x).dtype == jnp.bfloat16
    assert GROUPED_PRODUCT in str(jax.make_jaxpr(run)(x))
