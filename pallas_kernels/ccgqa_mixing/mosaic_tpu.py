"""The mixing of CCGQA as one Pallas kernel for TPU, forward and backward.

Each kernel holds some consecutive tokens of a row in VMEM, with the few beside them that their
convolutions reach, and computes the definition (`reference.mix`) or its vector-Jacobian product on
them. Projections are read as the matrix products that made them write them, all heads of a token
side by side; mixed heads are written head by head, as attention reads them. The backward kernel
recomputes from the inputs; nothing else is kept.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ccgqa_mixing.reference import HEAD_NORM_FLOOR, PRECISION
from pallas_kernels.platform import tpu_refusal

LANES = 128
# Tokens of a block in tiles. Of the blocks before and after it one tile each is read again, so that
# longer blocks refetch less: 3 % here.
BLOCK_TILES = 32
# How far convolutions may reach back: the tokens of a tile of float32.
MAX_REACH = 8
# Of the 64 MiB and more from v5 on; the 16 that are a kernel's by default hold no such blocks.
VMEM_LIMIT = 48 * 2**20
# Arrays of a block's tokens by all features, as float32, alive at once in the backward body.
LIVE = 8


class HeadsWeights(NamedTuple):
    """The convolutions of N heads as the kernels take them, float32; `bias` is of both together."""

    depthwise: Float[Array, "ld N h"]
    grouped: Float[Array, "lg N h h"]
    bias: Float[Array, "N h"]


class Weights(NamedTuple):
    """All that is learned, float32; `scale` is the RMS of a mixed key, the same along a head."""

    query: HeadsWeights
    key: HeadsWeights
    scale: Float[Array, "K h"]


def refusal(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kernels: tuple[int, int],
    dtype: jnp.dtype,
) -> str:
    """Why the kernel cannot serve, or nothing; `kernels` as `dispatch.choose` takes them."""
    if refused := tpu_refusal():
        return refused
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16, not {dtype.name}"
    if (reach := sum(kernels) - 2) > MAX_REACH:
        return f"looks {MAX_REACH} tokens back at most, not {reach}"
    padded = -(-head_dim // LANES) * LANES
    tokens = LIVE * 4 * (num_heads + 2 * num_kv_heads) * padded * BLOCK_TILES * tile_tokens(dtype)
    # Weights and their gradients, each twice as all that is moved.
    learned = 2 * (dtype.itemsize + 4) * kernels[1] * (num_heads + num_kv_heads) * head_dim * padded
    if tokens + learned > VMEM_LIMIT:
        return f"has no room for {num_heads} and {num_kv_heads} heads of {head_dim}"
    return ""


def tile_tokens(dtype: Any) -> int:
    """Tokens of a tile, 8 of float32 and 16 of bfloat16; a row has at least that many."""
    return 32 // jnp.dtype(dtype).itemsize


def block_tokens(length: int, dtype: Any) -> int:
    """Tokens of a block: whole tiles, no more than a row has."""
    return tile_tokens(dtype) * min(BLOCK_TILES, -(-length // tile_tokens(dtype)))


def forward(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    weights: Weights,
    delayed: Float[Array, "K h"],
    positions: Int[Array, "B T"],
    interpret: bool,
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
    """`reference.mix`.

    Args:
        q: Projected queries.
        k: Projected keys.
        v: Projected values.
        weights: All that is learned.
        delayed: 1 for columns of values that are the previous token's, 0 for the others.
        positions: Position of each token in its document.
        interpret: Runs the kernel without a TPU.
    """
    grid = _Grid(q, k, weights)
    given = (
        grid.positions(positions, after=False),
        *(grid.flat(x, "before", "block") for x in (q, k, v)),
        grid.weights(weights),
        grid.whole(delayed.reshape(1, -1)),
    )
    made = [grid.by_head(jnp.transpose(x, (0, 2, 1, 3)), "block") for x in (q, k, v)]
    results = grid.call(_forward_body, "forward", given, made, interpret)
    return tuple(jnp.transpose(x, (0, 2, 1, 3)) for (x,) in results)


def backward(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    weights: Weights,
    delayed: Float[Array, "K h"],
    positions: Int[Array, "B T"],
    cotangents: tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]],
    interpret: bool,
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"], Weights]:
    """Gradients of q, k, v and the weights for cotangents of what `forward` returns."""
    grid = _Grid(q, k, weights)
    cotangents = [jnp.transpose(x, (0, 2, 1, 3)) for x in cotangents]
    learned = grid.weights(weights)
    given = (
        grid.positions(positions, after=True),
        *(grid.flat(x, "before", "block", "after") for x in (q, k)),
        *(grid.by_head(x, "block", "after") for x in cotangents),
        learned,
        grid.whole(delayed.reshape(1, -1)),
    )
    # Values lie as keys do.
    made = (*(grid.flat(x, "block") for x in (q, k, k)), grid.sums(learned))
    *inputs, sums = grid.call(_backward_body, "backward", given, made, interpret)
    return (
        *(x.reshape(like.shape) for (x,), like in zip(inputs, (q, k, k), strict=True)),
        jax.tree.map(lambda x, like: x.reshape(like.shape), sums, weights),
    )


class _Operand(NamedTuple):
    array: Any
    spec: pl.BlockSpec


def _is_operand(x):
    return isinstance(x, _Operand)


class _Grid:
    """Rows by blocks of tokens, and how arrays are cut for them."""

    def __init__(self, q, k, weights):
        self.batch, self.length = q.shape[:2]
        self.heads = q.shape[2], *k.shape[2:]
        self.taps = len(weights.query.grouped)
        self.dtype = q.dtype
        self.tile, self.block = tile_tokens(q.dtype), block_tokens(self.length, q.dtype)
        self.blocks = pl.cdiv(self.length, self.block)

    def flat(self, x, *parts):
        """Parts of [B, T, N, h] with the heads of a token side by side: a block, tiles about it."""
        flat = x.reshape(*x.shape[:2], -1)
        return tuple(
            _Operand(
                flat,
                pl.BlockSpec((1, tokens, flat.shape[2]), lambda b, i, at=at: (b, at(i), 0)),
            )
            for tokens, at in map(self._part, parts)
        )

    def by_head(self, x, *parts):
        """The same of [B, N, T, h]."""
        return tuple(
            _Operand(
                x,
                pl.BlockSpec(
                    (1, x.shape[1], tokens, x.shape[3]), lambda b, i, at=at: (b, 0, at(i), 0)
                ),
            )
            for tokens, at in map(self._part, parts)
        )

    def _part(self, part):
        """Its tokens, and which of as many it is for block i; at a row's ends some other tile."""
        tiles, last = self.block // self.tile, pl.cdiv(self.length, self.tile) - 1
        return {
            "before": (self.tile, lambda i: jnp.maximum(i * tiles - 1, 0)),
            "block": (self.block, lambda i: i),
            "after": (self.tile, lambda i: jnp.minimum((i + 1) * tiles, last)),
        }[part]

    def positions(self, positions, after):
        """Of every block and the tiles about it; -1 outside a row. Along lanes, to be compact."""
        end = self.blocks * self.block
        padded = jnp.pad(
            positions,
            ((0, 0), (self.tile, end - self.length + self.tile)),
            constant_values=-1,
        )
        width = self.block + self.tile * (1 + after)
        windows = [padded[:, i * self.block :][:, :width] for i in range(self.blocks)]
        return _Operand(
            jnp.stack(windows, axis=1)[:, :, None],
            pl.BlockSpec((1, 1, 1, width), lambda b, i: (b, i, 0, 0)),
        )

    @staticmethod
    def whole(x):
        """An array that stays in VMEM."""
        return _Operand(x, pl.BlockSpec(x.shape, lambda b, i: (0,) * x.ndim))

    def weights(self, weights):
        """Depthwise ones as heads lie in `flat`, factors of matrix products in their dtype."""

        def of_heads(w):
            return HeadsWeights(
                self.whole(w.depthwise.reshape(len(w.depthwise), -1)),
                self.whole(w.grouped.astype(self.dtype)),
                self.whole(w.bias),
            )

        return Weights(of_heads(weights.query), of_heads(weights.key), self.whole(weights.scale))

    @staticmethod
    def sums(learned):
        """Like `weights`, in float32."""
        return jax.tree.map(
            lambda x: _Operand(jax.ShapeDtypeStruct(x.array.shape, jnp.float32), x.spec),
            learned,
            is_leaf=_is_operand,
        )

    def call(self, body, kind, given, made, interpret):
        """Runs a body on trees of operands and outputs."""

        def part(name, tree):
            return jax.tree.map(lambda x: getattr(x, name), tree, is_leaf=_is_operand)

        arrays = part("array", given)
        outputs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), part("array", made)
        )
        # Blocks and the tiles about them are views of the same arrays.
        moved = {id(x): x for x in jax.tree.leaves((arrays, outputs))}.values()
        tokens, (num_heads, num_kv_heads, head_dim) = self.batch * self.length, self.heads
        heads = tokens * (num_heads + num_kv_heads)
        passes = {"forward": 1, "backward": 3}[kind]
        return pl.pallas_call(
            body,
            name=f"ccgqa_mixing_{kind}",
            grid=(self.batch, self.blocks),
            in_specs=part("spec", given),
            out_specs=part("spec", made),
            out_shape=outputs,
            compiler_params=pltpu.CompilerParams(
                # Gradients of weights are summed over the grid.
                dimension_semantics=("parallel" if kind == "forward" else "arbitrary",) * 2,
                vmem_limit_bytes=VMEM_LIMIT,
            ),
            cost_estimate=pl.CostEstimate(
                flops=passes * heads * head_dim * (2 * self.taps * head_dim + 16),
                transcendentals=heads,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
            ),
            interpret=interpret,
        )(*arrays)


def _forward_body(positions, q, k, v, weights, delayed, q_out, k_out, v_out):
    position = positions[0, 0, 0][:, None]
    (q_out,), (k_out,), (v_out,) = q_out, k_out, v_out
    queries = _convolutions(_window(q, position), weights.query, position)
    keys = _convolutions(_window(k, position), weights.key, position)
    block = slice(q[0].shape[1], None)
    group = q_out.shape[1] // k_out.shape[1]
    for j in range(k_out.shape[1]):
        k0 = keys.head(keys.z, j, block)
        total = jnp.zeros_like(k0)
        for n in range(j * group, (j + 1) * group):
            q0 = queries.head(queries.z, n, block)
            total += q0
            unit, _ = _normalised(queries.output(n, block) + (q0 + k0) / 2)
            q_out[0, n] = unit.astype(q_out.dtype)
        unit, _ = _normalised(keys.output(j, block) + (total / group + k0) / 2)
        k_out[0, j] = (unit * weights.scale[j : j + 1]).astype(k_out.dtype)
    v = _window(v, position)
    v = jnp.where(delayed[...] > 0, _earlier(v, 1, position), v)
    for j in range(v_out.shape[1]):
        v_out[0, j] = keys.head(v, j, block).astype(v_out.dtype)


def _backward_body(
    positions, q, k, d_q, d_k, d_v, weights, delayed, d_q_out, d_k_out, d_v_out, sums
):
    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        for one in jax.tree.leaves(sums):
            one[...] = jnp.zeros(one.shape, one.dtype)

    position = positions[0, 0, 0][:, None]
    queries = _convolutions(_window(q, position), weights.query, position)
    keys = _convolutions(_window(k, position), weights.key, position)
    # Outputs of the block and of the tokens after it that it reaches; those before are others'.
    tile, tokens = q[0].shape[1], q[1].shape[1]
    reached, own = slice(tile, None), slice(0, tokens)
    position = position[reached]

    def cotangent(parts, n):
        whole = jnp.concatenate([part[0, n].astype(jnp.float32) for part in parts], axis=0)
        return jnp.where(position >= 0, whole, 0.0)

    num_kv_heads, head_dim = weights.scale.shape
    group = weights.query.bias.shape[0] // num_kv_heads
    d_q0, d_k0, d_c_q, d_c_k = [], [], [], []
    for j in range(num_kv_heads):
        members = range(j * group, (j + 1) * group)
        k0 = keys.head(keys.z, j, reached)
        q0 = [queries.head(queries.z, n, reached) for n in members]

        unit, inverse = _normalised(keys.output(j, reached) + (sum(q0) / group + k0) / 2)
        d_key = cotangent(d_k, j)
        sums.scale[j : j + 1] += _over_tokens((unit * d_key)[own])
        d_y = _normalised_gradient(unit, inverse, d_key * weights.scale[j : j + 1])
        d_c_k.append(keys.output_gradient(j, d_y, tile, own, position, sums.key))
        d_mean_k, d_means = d_y / group, d_y

        for n, one in zip(members, q0, strict=True):
            unit, inverse = _normalised(queries.output(n, reached) + (one + k0) / 2)
            d_y = _normalised_gradient(unit, inverse, cotangent(d_q, n))
            d_c_q.append(queries.output_gradient(n, d_y, tile, own, position, sums.query))
            d_q0.append((d_y + d_mean_k)[own] / 2)
            d_means += d_y
        d_k0.append(d_means[own] / 2)

    for side, d_z, d_c, added, (out,) in (
        (queries, d_q0, d_c_q, sums.query, d_q_out),
        (keys, d_k0, d_c_k, sums.key, d_k_out),
    ):
        d_z, d_c = (jnp.concatenate(heads, axis=1) for heads in (d_z, d_c))
        window = positions[0, 0, 0][:, None]
        for lag in range(side.weights.depthwise.shape[0]):
            tap = slice(lag, lag + 1)
            d_z += (side.weights.depthwise[tap] * _later(d_c, lag, position))[own]
            z = _earlier(side.z, lag, window)[tile : tile + tokens]
            added.depthwise[tap] += _over_tokens(z * d_c[own])
        out[0] = d_z.astype(out.dtype)

    d_v = jnp.concatenate([cotangent(d_v, j) for j in range(num_kv_heads)], axis=1)
    d_v = jnp.where(delayed[...] > 0, _later(d_v, 1, position), d_v)
    (d_v_out,) = d_v_out
    d_v_out[0] = d_v[own].astype(d_v_out.dtype)


class _Convolutions(NamedTuple):
    """Heads of a window and their convolutions.

    Attributes:
        z: Inputs, heads side by side.
        lagged: The depthwise convolution without its bias, as it was 0, 1, .. tokens earlier.
        weights: References to the weights.
    """

    z: Array
    lagged: list[Array]
    weights: HeadsWeights

    def head(self, x, n, tokens):
        head_dim = self.weights.bias.shape[1]
        return x[tokens, n * head_dim : (n + 1) * head_dim]

    def output(self, n, tokens):
        """Both convolutions of head n."""
        y = self.weights.bias[n : n + 1]
        for lag, c in enumerate(self.lagged):
            y = y + _product(self.head(c, n, tokens), self.weights.grouped[lag, n], 1, 0)
        return y

    def output_gradient(self, n, d_y, tile, own, position, sums):
        """Gradient of the depthwise convolution of head n; adds to those of the other weights."""
        sums.bias[n : n + 1] += _over_tokens(d_y[own])
        rounded = d_y.astype(self.weights.grouped.dtype)
        d_c = jnp.zeros_like(d_y)
        for lag, c in enumerate(self.lagged):
            c = self.head(c, n, slice(tile, tile + own.stop))
            sums.grouped[lag, n] += _product(c, rounded[own], 0, 0)
            d_c += _later(_product(rounded, self.weights.grouped[lag, n], 1, 1), lag, position)
        return d_c


def _convolutions(z, weights, position):
    taps = weights.depthwise[...]
    c = sum(taps[lag : lag + 1] * _earlier(z, lag, position) for lag in range(len(taps)))
    dtype = weights.grouped.dtype
    lagged = [_earlier(c, lag, position).astype(dtype) for lag in range(weights.grouped.shape[0])]
    return _Convolutions(z, lagged, weights)


def _window(parts, position):
    """Consecutive tokens of [1, tokens, Nh] as float32, zeros outside the row."""
    whole = jnp.concatenate([part[0].astype(jnp.float32) for part in parts], axis=0)
    return jnp.where(position >= 0, whole, 0.0)


def _earlier(x, steps, position):
    """`reference.earlier`, but that a window's first tokens get what its last ones have."""
    if steps == 0:
        return x
    return jnp.where(position >= steps, pltpu.roll(x, steps, 0), 0.0)


def _later(x, steps, position):
    """The transpose of `_earlier`."""
    if steps == 0:
        return x
    return pltpu.roll(jnp.where(position >= steps, x, 0.0), x.shape[0] - steps, 0)


def _normalised(x):
    """(x over its RMS, the inverse of that)."""
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + HEAD_NORM_FLOOR)
    return x * inverse, inverse


def _normalised_gradient(unit, inverse, d_unit):
    return inverse * (d_unit - unit * jnp.mean(unit * d_unit, axis=1, keepdims=True))


def _product(x, y, x_axis, y_axis):
    """Contracts an axis of each, in float32; Mosaic takes no precision for bfloat16."""
    precision = PRECISION if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x,
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _over_tokens(x):
    return jnp.sum(x, axis=0, keepdims=True)
