"""Chooses the implementation of CCGQA's mixing, and splits its rows and heads over a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.ccgqa_mixing import mosaic_tpu
from pallas_kernels.ccgqa_mixing.mosaic_tpu import HeadsWeights, Weights
from pallas_kernels.ccgqa_mixing.reference import Convolutions, delayed_columns, joint_bias, mix
from pallas_kernels.platform import platform_in_use

# Platform of each fused implementation; elsewhere it is interpreted, slowly, if it is asked for.
KERNELS = {"mosaic_tpu": "tpu"}
IMPLEMENTATIONS = ("reference", *KERNELS)

Mixed = tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]


def choose(
    implementation: str,
    platform: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kernels: tuple[int, int],
    dtype: Any,
) -> tuple[str, str]:
    """Names the implementation that `ccgqa_mix` runs and says why.

    Args:
        implementation: "auto" or a name in `IMPLEMENTATIONS`.
        platform: "cpu", "gpu" or "tpu".
        num_heads: H.
        num_kv_heads: K.
        head_dim: h.
        kernels: Taps of the depthwise and of the grouped convolution.
        dtype: Of queries, keys and values.

    Returns:
        (name, reason). "auto" takes the platform's kernel where it can serve.

    Raises:
        ValueError: If the name is unknown, or the kernel asked for cannot serve.
    """
    if implementation == "reference":
        return "reference", "asked for; plain JAX, fused by XLA"
    if implementation not in ("auto", *KERNELS):
        raise ValueError(
            f"unknown implementation {implementation!r} of ccgqa_mix; "
            f"allowed: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "auto" and platform not in KERNELS.values():
        return "reference", f"no fused kernel for {platform.upper()}: plain JAX, fused by XLA"
    refusal = mosaic_tpu.refusal(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kernels=kernels,
        dtype=jnp.dtype(dtype),
    )
    if implementation == "auto":
        if refusal:
            return "reference", f"mosaic_tpu {refusal}: plain JAX, fused by XLA"
        return "mosaic_tpu", "fused, forward and backward"
    if refusal:
        raise ValueError(f"implementation {implementation!r} of ccgqa_mix {refusal}")
    if KERNELS[implementation] != platform:
        return implementation, f"asked for; interpreted on {platform.upper()}, slow"
    return implementation, "asked for"


def ccgqa_mix(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    query: Convolutions,
    key: Convolutions,
    log_temperature: Float[Array, "K"],
    positions: Int[Array, "B T"] | None,
    *,
    implementation: str = "auto",
    rows: Any = None,
    heads: str | None = None,
) -> Mixed:
    """Queries, keys and values of CCGQA from their projections; `reference.mix` is the definition.

    Args:
        q: Projected queries.
        k: Projected keys, in the dtype of `q`.
        v: Projected values, likewise.
        query: The convolutions of queries, in their stored dtype.
        key: The convolutions of keys.
        log_temperature: Of each key-value head.
        positions: Position of each token in its document, 0 or more; None where every row is one
            document that starts at its first column.
        implementation: "auto" or a name in `IMPLEMENTATIONS`.
        rows: On a mesh, the axis or axes that rows are split over; None for none. A kernel runs on
            each device's own rows and heads. Plain JAX is left to the partitioner.
        heads: The mesh axis that heads are split over, whose length divides K; None for none.

    Returns:
        Queries, keys and values before rotary positions, in the dtype of the projections.

    Raises:
        ValueError: As `choose`, and for shapes or dtypes that do not go together.
    """
    _check(q, k, v, query, key, log_temperature, positions)
    name, _ = choose(
        implementation,
        platform := platform_in_use(),
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        kernels=(len(query.depthwise), len(query.grouped)),
        dtype=q.dtype,
    )
    # Rows shorter than a tile are those of a prompt of a few tokens.
    if name == "reference" or q.size == 0 or q.shape[1] < mosaic_tpu.tile_tokens(q.dtype):
        return mix(q, k, v, query, key, log_temperature, positions)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    scale = jnp.exp(log_temperature.astype(jnp.float32))
    weights = Weights(
        _joined(query), _joined(key), jnp.broadcast_to(scale[:, None], (len(scale), k.shape[3]))
    )
    delayed = delayed_columns(*v.shape[2:]).astype(jnp.float32)
    interpret = KERNELS[name] != platform
    return _fused(q, k, v, weights, delayed, positions.astype(jnp.int32), interpret, rows, heads)


def _check(q, k, v, query, key, log_temperature, positions):
    batch, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    shapes = (batch, length, num_kv_heads, head_dim)
    if k.shape != shapes or v.shape != shapes or num_heads % num_kv_heads:
        raise ValueError(
            "ccgqa_mix takes queries [B, T, H, h], keys and values [B, T, K, h] and H a multiple "
            f"of K, not {q.shape}, {k.shape} and {v.shape}"
        )
    got = log_temperature.shape, None if positions is None else positions.shape
    if got[0] != (num_kv_heads,) or got[1] not in (None, (batch, length)):
        raise ValueError(
            f"ccgqa_mix takes log-temperatures [K] and positions [B, T] or None, not {got[0]} and "
            f"{got[1]}"
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ValueError(f"ccgqa_mix takes one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    for name, one, count in (("query", query, num_heads), ("key", key, num_kv_heads)):
        got = tuple(x.shape[-len(like) :] for x, like in zip(one, _SIZES, strict=True))
        expected = tuple(
            tuple({"N": count, "h": head_dim}[size] for size in like) for like in _SIZES
        )
        if got != expected:
            raise ValueError(
                f"ccgqa_mix takes convolutions of {count} heads of {head_dim} as `{name}`, "
                f"not of shapes {[x.shape for x in one]}"
            )


_SIZES = ("Nh", "Nh", "Nhh", "Nh")  # last axes of the fields of `Convolutions`


def _joined(one: Convolutions) -> HeadsWeights:
    depthwise, grouped, bias = (
        x.astype(jnp.float32) for x in (one.depthwise, one.grouped, joint_bias(one))
    )
    return HeadsWeights(depthwise, grouped, bias)


# Each pass is mapped over the mesh by itself: the transpose of a mapped call would add gradients up
# over the mesh axes that split nothing, though all devices along them have the same.
@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _fused(q, k, v, weights, delayed, positions, interpret, rows, heads):
    run = functools.partial(mosaic_tpu.forward, interpret=interpret)
    wide, learned, columns, tokens = _specs(rows, heads)
    return _on_each_device(run, (wide, wide, wide, learned, columns, tokens), (wide,) * 3)(
        q, k, v, weights, delayed, positions
    )


def _fused_forward(q, k, v, weights, delayed, positions, interpret, rows, heads):
    mixed = _fused(q, k, v, weights, delayed, positions, interpret, rows, heads)
    return mixed, (q, k, weights, delayed, positions)


def _fused_backward(interpret, rows, heads, residuals, cotangents):
    others = rows if _is_split() else None

    def run(*arguments):
        *inputs, learned = mosaic_tpu.backward(*arguments, interpret=interpret)
        # Weights are the same for all rows.
        return *inputs, learned if others is None else jax.lax.psum(learned, others)

    wide, learned, columns, tokens = _specs(rows, heads)
    d_q, d_k, d_v, d_weights = _on_each_device(
        run, (wide, wide, learned, columns, tokens, (wide,) * 3), (wide, wide, wide, learned)
    )(*residuals, cotangents)
    return d_q, d_k, d_v, d_weights, jnp.zeros_like(residuals[3]), None


_fused.defvjp(_fused_forward, _fused_backward)


def _specs(rows, heads):
    """How activations, weights, columns of values and tokens are split."""
    of_heads = HeadsWeights(
        jax.P(None, heads, None), jax.P(None, heads, None, None), jax.P(heads, None)
    )
    columns = jax.P(heads, None)
    wide = jax.P(rows, None, heads, None)
    return wide, Weights(of_heads, of_heads, columns), columns, jax.P(rows, None)


def _on_each_device(run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    if not _is_split():
        return run
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _is_split() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual)
