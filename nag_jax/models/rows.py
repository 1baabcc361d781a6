"""Rows sorted by expert, and products of each expert's rows with its own weight.

Shapes are static, group sizes are not: nothing is dropped or padded to a capacity, memory follows
the number of rows and cost follows the sizes of the groups. Who is routed where, and how rows
reach the devices of their experts, is decided elsewhere.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nag_jax.errors import UserError
from nag_jax.models.grouped_gradient import weight_gradient
from pallas_kernels.platform import platform_in_use

# Rows of a block, largest first; the last may overshoot its group. Measured on CPU at widths 256
# and 688: larger last blocks waste products on small groups, smaller ones are slow per row.
BLOCKS = (512, 128, 32)


class UnsuitableImplementation(UserError, ValueError):
    """The grouped matmul asked for cannot serve, or is not known."""


class Choice(NamedTuple):
    """An implementation of the grouped matmul and why it was taken.

    Attributes:
        name: "blocked", "ragged_dot" or "tokamax".
        reason: Why, in a few words.
    """

    name: str
    reason: str

    @property
    def row(self) -> tuple[str, str, str]:
        """(operation, implementation, reason), for the header of a run."""
        return "grouped matmul", self.name, self.reason


def choose(
    requested: str, platform: str, *, dtype: str | jnp.dtype, strict: bool = False
) -> Choice:
    """Names the implementation for `grouped_matmul` and says why.

    Args:
        requested: "auto", "blocked", "ragged_dot" or "tokamax".
        platform: "cpu", "gpu" or "tpu".
        dtype: Dtype of the products.
        strict: Whether "auto" raises where no fused kernel serves, and does not fall back.

    Returns:
        The choice. "auto" takes the platform's fused kernel if it serves: on CPU and GPU
        `jax.lax.ragged_dot` multiplies every row with every expert, so "blocked" serves there.

    Raises:
        UnsuitableImplementation: If the name is unknown, if the one asked for cannot serve, or if
            no fused kernel serves under `strict`.
    """
    if requested == "blocked":
        return Choice("blocked", "asked for; cost follows the sizes of the groups")
    if requested == "auto":
        kernel = {"tpu": "ragged_dot", "gpu": "tokamax"}.get(platform)
        if kernel is None:
            reason = f"no fused kernel for {platform.upper()}"
        else:
            refusal = _refusal(kernel, platform, jnp.dtype(dtype))
            if refusal is None:
                return Choice(kernel, _ABOUT[kernel])
            reason = f"{kernel} {refusal}"
        if strict:
            raise UnsuitableImplementation(
                f"model.strict_kernels is set and no fused grouped matmul serves: {reason}"
            )
        return Choice("blocked", reason)
    if requested not in _ABOUT:
        raise UnsuitableImplementation(
            f"unknown grouped matmul {requested!r}; allowed: auto, blocked, {', '.join(_ABOUT)}"
        )
    refusal = _refusal(requested, platform, jnp.dtype(dtype))
    if refusal is not None:
        raise UnsuitableImplementation(f"grouped matmul {requested!r} cannot serve: it {refusal}")
    about = _ABOUT[requested]
    if requested == "ragged_dot" and platform != "tpu":
        about = f"on {platform.upper()} it multiplies every row with every expert"
    return Choice(requested, f"asked for; {about}")


_ABOUT = {
    "ragged_dot": "XLA's grouped kernel",
    "tokamax": "fused kernels for GPU",
}


def _refusal(kernel: str, platform: str, dtype: jnp.dtype) -> str | None:
    """Why a kernel does not serve, or None; `ragged_dot` runs everywhere, slowly but on TPU."""
    if kernel == "ragged_dot":
        return None
    if platform != "gpu":
        return f"runs on GPU, not on {platform.upper()}"
    if importlib.util.find_spec("tokamax") is None:
        return "is not installed"
    if jax.default_backend() != "gpu":  # it asks the attached device, not the mesh
        return "cannot be compiled where no GPU is attached"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16: it does not promise {dtype} products"
    return None


class Sorting(NamedTuple):
    """Where rows go when they are sorted by group, and back.

    Attributes:
        order: int32 [N], the row that comes to each place.
        places: int32 [N], the place that each row goes to: the inverse permutation.
        group_sizes: int32 [E], rows of each group.
    """

    order: Int[Array, "N"]
    places: Int[Array, "N"]
    group_sizes: Int[Array, "E"]


def sort_by_group(groups: Int[Array, "N"], num_groups: int) -> Sorting:
    """Sorts rows by group; rows of a group keep their order.

    Args:
        groups: int32 group of each row; rows of group `num_groups` belong nowhere and come last.
        num_groups: Number of groups E.

    Returns:
        The permutation, its inverse and the sizes.
    """
    rows = jnp.arange(groups.shape[0], dtype=jnp.int32)
    in_order, order = jax.lax.sort((groups.astype(jnp.int32), rows), num_keys=1, is_stable=True)
    places = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
    edges = jnp.searchsorted(in_order, jnp.arange(num_groups + 1, dtype=jnp.int32))
    return Sorting(order, places, jnp.diff(edges).astype(jnp.int32))


@jax.custom_vjp
def gather_rows(
    x: Float[Array, "T d"], order: Int[Array, "N"], places: Int[Array, "Tk"]
) -> Float[Array, "N d"]:
    """Rows in sorted order, where each row of `x` stands for k choices, one after another.

    The transpose is a gather by the inverse permutation and a sum over k: that of a plain gather
    would be a scatter.

    Args:
        x: Rows.
        order: `Sorting.order` of the T k choices, or a first part of it.
        places: `Sorting.places` of all of them.

    Returns:
        Row r is `x[order[r] // k]`.
    """
    return take_rows(x, order // (places.shape[0] // x.shape[0]))


@jax.custom_vjp
def collect_rows(
    rows: Float[Array, "N d"], order: Int[Array, "N"], places: Int[Array, "Tk"]
) -> Float[Array, "Tk d"]:
    """Undoes the sorting: the row of each choice, zero if its place is past the last row.

    Args:
        rows: Rows in sorted order.
        order: As in `gather_rows`.
        places: As in `gather_rows`.

    Returns:
        Row c is `rows[places[c]]`; the transpose, too, is a gather.
    """
    return take_rows(rows, places, past_the_end=rows.shape[0] < places.shape[0])


def take_rows(x: Array, rows: Array, past_the_end: bool = False) -> Array:
    """x[rows], where rows past the end, if there can be any, are zero."""
    mode = "fill" if past_the_end else "promise_in_bounds"
    # Outside of a trace a custom_vjp function is handed NumPy arrays as they are.
    return jnp.asarray(x).at[rows].get(mode=mode, fill_value=0, wrap_negative_indices=False)


def _gather_rows_backward(residuals, d_rows):
    order, places, tokens = residuals
    d_x = collect_rows(d_rows, order, places)
    if places.shape[0] != tokens:
        d_x = d_x.reshape(tokens, -1, d_rows.shape[1]).sum(1)
    return d_x, None, None


gather_rows.defvjp(
    lambda x, order, places: (gather_rows(x, order, places), (order, places, x.shape[0])),
    _gather_rows_backward,
)
collect_rows.defvjp(
    lambda rows, order, places: (collect_rows(rows, order, places), order),
    lambda order, d_choices: (take_rows(d_choices, order), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x: Float[Array, "N i"],
    w: Float[Array, "E i o"],
    group_sizes: Int[Array, "E"],
    implementation: str,
) -> Float[Array, "N o"]:
    """Multiplies each group of rows with its own matrix: y[r] = x[r] w[group of r].

    Rows past the sum of `group_sizes` are zero in the product and in the gradient of `x`, and add
    nothing to that of `w`, whatever they and their cotangents hold, NaN too.

    Args:
        x: Rows sorted by group, of the dtype of the products.
        w: One matrix per group, of the same dtype.
        group_sizes: int32, rows of each group, N at most in all.
        implementation: The name of a `Choice`.

    Returns:
        Products in the inputs' dtype; those of float32 are float32 throughout.
    """
    if implementation == "blocked":
        return _blocked_product(x, w, group_sizes)
    return _of_a_group(_kernel(implementation, group_sizes)(x, w), group_sizes)


def _grouped_backward(implementation, residuals, d_y):
    x, w, group_sizes = residuals
    if implementation == "blocked":
        d_x = _blocked_product(d_y, w, group_sizes, transpose=True)
        return d_x, _blocked_weight_gradient(x, d_y, group_sizes, w.dtype), None
    kernel = _kernel(implementation, group_sizes)
    d_y = _of_a_group(d_y, group_sizes)
    if implementation == "ragged_dot" and _lacks_gradient_kernel(x.dtype):
        (d_x,) = jax.vjp(lambda x: kernel(x, w), x)[1](d_y)
        return _of_a_group(d_x, group_sizes), weight_gradient(x, d_y, group_sizes), None
    d_x, d_w = jax.vjp(kernel, _of_a_group(x, group_sizes), w)[1](d_y)
    return _of_a_group(d_x, group_sizes), d_w, None


def _lacks_gradient_kernel(dtype: jnp.dtype) -> bool:
    """Whether XLA has none and `weight_gradient` serves, which would round float32 to bfloat16."""
    old = jax.__version_info__ < (0, 11)
    return old and platform_in_use() == "tpu" and dtype == jnp.bfloat16


grouped_matmul.defvjp(
    lambda x, w, group_sizes, implementation: (
        grouped_matmul(x, w, group_sizes, implementation),
        (x, w, group_sizes),
    ),
    _grouped_backward,
)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """HIGHEST for float32; TPU and GPU kernels refuse it for narrower dtypes, which are exact."""
    return jax.lax.Precision.HIGHEST if dtype.itemsize >= 4 else None


def _kernel(implementation: str, group_sizes: Array) -> Callable[[Array, Array], Array]:
    """A fused kernel as a function of rows and weights."""

    def run(x: Array, w: Array) -> Array:
        if implementation == "ragged_dot":
            return jax.lax.ragged_dot(x, w, group_sizes, precision=_precision(x.dtype))
        from tokamax import ragged_dot

        # Its fallback to XLA, which is dense, is left out.
        return ragged_dot(x, w, group_sizes, implementation=("mosaic", "triton"))

    return run


def _of_a_group(rows: Array, group_sizes: Array) -> Array:
    """Zeros the rows past the total; selected, so that NaN does not stay."""
    inside = jnp.arange(rows.shape[0]) < group_sizes.sum()
    return jnp.where(inside[:, None], rows, 0)


def _blocks(body: Callable, start: Array, size: Array, rows: int, carry: Array) -> Array:
    """Runs `carry = body(first row, block, carry, mask)` over the rows of a group.

    Whole blocks come without a mask; the last, smaller ones may overshoot the group, or be moved
    back before it where the array ends, and come with the mask of the rows that count.
    """
    blocks = [block for block in BLOCKS if block <= rows] or [rows]
    done = jnp.zeros((), jnp.int32)
    for block in blocks[:-1]:
        whole = (size - done) // block
        at = start + done
        carry = jax.lax.fori_loop(
            0,
            whole,
            lambda i, carry, at=at, block=block: body(at + i * block, block, carry, None),
            carry,
        )
        done += whole * block
    block = blocks[-1]

    def masked(i, carry):
        at = start + done + i * block
        first = jnp.minimum(at, rows - block)
        row = first + jnp.arange(block)
        return body(first, block, carry, ((row >= at) & (row < start + size))[:, None])

    return jax.lax.fori_loop(0, -(-(size - done) // block), masked, carry)


def _blocked_product(x: Array, w: Array, group_sizes: Array, *, transpose: bool = False) -> Array:
    """y[r] = x[r] w[group of r], or its transpose; groups without rows cost nothing."""
    starts = jnp.cumsum(group_sizes) - group_sizes
    busy = group_sizes > 0
    experts = jnp.argsort(~busy, stable=True)
    contract = (((1,), (1 if transpose else 0,)), ((), ()))

    def group(i, y):
        expert = experts[i]
        matrix = w[expert]

        def body(first, block, y, mask):
            rows = jax.lax.dynamic_slice_in_dim(x, first, block)
            product = jax.lax.dot_general(rows, matrix, contract, precision=_precision(x.dtype))
            if mask is not None:
                product = jnp.where(mask, product, jax.lax.dynamic_slice_in_dim(y, first, block))
            return jax.lax.dynamic_update_slice_in_dim(y, product, first, 0)

        return _blocks(body, starts[expert], group_sizes[expert], x.shape[0], y)

    y = jnp.zeros((x.shape[0], w.shape[1 if transpose else 2]), x.dtype)
    return jax.lax.fori_loop(0, busy.sum(), group, y)


def _blocked_weight_gradient(x: Array, d_y: Array, group_sizes: Array, dtype: jnp.dtype) -> Array:
    """sum over the rows of each group of x[r]^T d_y[r]: [E, i, o], summed in float32 at least."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def body(first, block, total, mask):
        pair = [jax.lax.dynamic_slice_in_dim(rows, first, block) for rows in (x, d_y)]
        if mask is not None:
            pair = [jnp.where(mask, rows, 0) for rows in pair]
        return total + jax.lax.dot_general(
            *pair,
            (((0,), (0,)), ((), ())),
            precision=_precision(x.dtype),
            preferred_element_type=wide,
        )

    def group(_, start_and_size):
        total = jnp.zeros((x.shape[1], d_y.shape[1]), wide)
        return None, _blocks(body, *start_and_size, x.shape[0], total).astype(dtype)

    starts = jnp.cumsum(group_sizes) - group_sizes
    return jax.lax.scan(group, None, (starts, group_sizes))[1]
