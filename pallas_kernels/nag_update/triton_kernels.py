"""The update and its gradient in Triton's language; `gradient` has the equations.

Importing this needs `triton`, an optional extra, so `triton_call` does it only to run a kernel.
"""

import triton
import triton.language as tl

from pallas_kernels.nag_update.reference import ABSOLUTE_FLOOR, RELATIVE_FLOOR

RELATIVE_SQ = tl.constexpr(RELATIVE_FLOOR**2)
ABSOLUTE = tl.constexpr(ABSOLUTE_FLOOR)


@triton.jit
def forward_kernel(
    direction,
    branch,
    gain,
    updated,
    growth,
    tokens: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    padded: tl.constexpr,
):
    """Updates `rows` tokens; statistics have the dtype of `gain`."""
    token, inside, at, whole = _place(tokens, width, rows, padded)
    a = tl.load(gain + token, mask=inside, other=0.0)
    r = tl.load(direction + at, mask=whole, other=0.0).to(a.dtype)
    f = tl.load(branch + at, mask=whole, other=0.0).to(a.dtype)
    f, share, p, floors, inverse, k, q, written, over_rms = _recompute(r, f, a, whole, width)
    tl.store(updated + at, tl.where(a == 0, r, written * over_rms), mask=whole)
    tl.store(growth + token, a * a * q, mask=inside)


@triton.jit
def backward_kernel(
    direction,
    branch,
    gain,
    d_updated,
    d_log_gain,
    d_direction,
    d_branch,
    d_gain,
    tokens: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    padded: tl.constexpr,
):
    """Gradients of `rows` tokens."""
    token, inside, at, whole = _place(tokens, width, rows, padded)
    a = tl.load(gain + token, mask=inside, other=0.0)
    e = tl.load(d_log_gain + token, mask=inside, other=0.0).to(a.dtype)
    r = tl.load(direction + at, mask=whole, other=0.0).to(a.dtype)
    f = tl.load(branch + at, mask=whole, other=0.0).to(a.dtype)
    c = tl.load(d_updated + at, mask=whole, other=0.0).to(a.dtype)
    f, share, p, floors, inverse, k, q, written, over_rms = _recompute(r, f, a, whole, width)
    inverse_sq = inverse * inverse
    y = written * over_rms
    d_written = (c - y * (_total(y * c) / width)) * over_rms
    along = _total(d_written * p)
    earned = k * along
    e = e / (1 + a * a * q)
    tl.store(d_gain + token, along * (inverse * width**0.5) + e * a * q, mask=inside)
    e = e * a * a
    d_p = k * d_written + (inverse_sq * (e * (inverse_sq * floors) - earned)) * p
    t = _total(d_p * r) / _total(r * r)
    tl.store(d_direction + at, d_written - share * d_p - t * (p - share * r), mask=whole)
    d_f = d_p - t * r - (RELATIVE_SQ * inverse_sq * (earned + e * q)) * f
    tl.store(d_branch + at, d_f - _total(d_f) / width, mask=whole)


@triton.jit
def _place(tokens: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr):
    """Tokens [rows, 1], entries [rows, padded], and which of them there are."""
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    feature = tl.arange(0, padded)[None]
    inside = token < tokens
    return token, inside, token * width + feature, inside & (feature < width)


@triton.jit
def _recompute(r, f, a, whole, width: tl.constexpr):
    f = tl.where(whole, f - _total(f) / width, 0.0)
    share = _total(f * r) / _total(r * r)
    p = f - share * r
    length_sq = _total(p * p)
    floors = RELATIVE_SQ * _total(f * f) + ABSOLUTE
    inverse = tl.rsqrt(length_sq + floors)
    k = a * (inverse * width**0.5)
    written = r + k * p
    over_rms = tl.rsqrt(_total(written * written) / width)
    return f, share, p, floors, inverse, k, length_sq * inverse * inverse, written, over_rms


@triton.jit
def _total(x):
    return tl.sum(x, axis=1, keep_dims=True)
