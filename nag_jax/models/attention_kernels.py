"""Which implementation computes softmax attention, and one call for all of them.

`choose` needs no device: it says from the platform's name and the shapes what serves and, where no
fused kernel does, why. `attend` runs the choice. The kernels themselves live in JAX and tokamax;
here their inputs are laid out, padded with zeros where they ask for it, and split over the mesh.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from nag_jax.errors import UserError
from nag_jax.models.chunked_attention import SAVED_NAMES, chunked_attention
from nag_jax.models.kept_attention import kept_attention
from nag_jax.sharding.rules import rows_spec
from pallas_kernels.platform import platform_in_use

LANES = 128


class UnsuitableKernel(UserError, ValueError):
    """The implementation asked for cannot compute this attention exactly, or is not known."""


class Choice(NamedTuple):
    """An implementation and why it was taken.

    Attributes:
        name: "chunked" or a name in `KERNELS`.
        reason: Why, in a few words.
        fused: Whether it is a fused kernel.
    """

    name: str
    reason: str
    fused: bool

    @property
    def row(self) -> tuple[str, str, str]:
        """(operation, implementation, reason), for the header of a run."""
        return "attention", self.name, self.reason


class Case(NamedTuple):
    """What a kernel is asked to compute; `packed`: rows may hold several documents."""

    head_dim: int
    dtype: jnp.dtype
    packed: bool


def choose(
    requested: str,
    platform: str,
    *,
    head_dim: int,
    dtype: str | jnp.dtype,
    packed: bool,
    strict: bool = False,
) -> Choice:
    """Names the implementation that `attend` runs and says why.

    Args:
        requested: "auto", "chunked" or a name in `KERNELS`.
        platform: "cpu", "gpu" or "tpu".
        head_dim: Width of a head.
        dtype: Dtype of queries, keys and values.
        packed: Whether a row may hold several documents.
        strict: Whether "auto" raises where no fused kernel serves, and does not fall back.

    Returns:
        The choice. "auto" takes the first kernel of the platform that serves, and is exact in the
        inputs' dtype: float32 goes to a kernel only if that multiplies in float32.

    Raises:
        UnsuitableKernel: If the name is unknown, if the kernel asked for cannot serve, or if none
            serves under `strict`.
    """
    case = Case(head_dim, jnp.dtype(dtype), packed)
    if requested == "chunked":
        return Choice("chunked", "asked for; memory linear in the row length", False)
    if requested == "auto":
        refusals = []
        for name, kernel in KERNELS.items():
            if kernel.platform == platform:
                refusal = kernel.refusal(case)
                if refusal is None:
                    return Choice(name, _serves(kernel, case), True)
                refusals.append(f"{name} {refusal}")
        reason = "; ".join(refusals) or f"no fused kernel for {platform.upper()}"
        if strict:
            raise UnsuitableKernel(
                f"model.strict_kernels is set and no fused attention serves: {reason}"
            )
        return Choice("chunked", reason, False)
    if requested not in KERNELS:
        raise UnsuitableKernel(
            f"unknown attention implementation {requested!r}; "
            f"allowed: auto, chunked, {', '.join(KERNELS)}"
        )
    kernel = KERNELS[requested]
    if kernel.platform != platform:
        refusal = f"runs on {kernel.platform.upper()}, not on {platform.upper()}"
    else:
        refusal = kernel.refusal(case)
    if refusal is not None:
        raise UnsuitableKernel(f"attention implementation {requested!r} cannot serve: it {refusal}")
    return Choice(requested, f"asked for; {_serves(kernel, case)}", True)


def attend(
    q: Float[Array, "B T K G h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
    *,
    implementation: str,
    chunk: int,
    packed: bool,
    keep: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T K G h"]:
    """softmax(q k^T / sqrt(h)) v over earlier positions of the same document.

    Args:
        q: Queries, G query heads for each of K key-value heads.
        k: Keys.
        v: Values.
        segment_ids: Document of each position within its row.
        implementation: What `choose` is asked for.
        chunk: Queries per chunk, for the chunked implementation.
        packed: Whether a row may hold several documents. If not, a row is one document from its
            first position on, and padding to its right has outputs that mean nothing.
        keep: Queries whose output is wanted. The chunked implementation runs these alone; fused
            kernels, which take no such choice, run all.

    Returns:
        Attention output in `q`'s dtype.
    """
    choice = choose(
        implementation,
        platform_in_use(),
        head_dim=q.shape[-1],
        dtype=q.dtype,
        packed=packed,
    )
    if not choice.fused:
        if keep is not None:
            run = functools.partial(kept_attention, chunk=chunk)
            return _per_device(run, q, k, v, segment_ids, keep)
        run = functools.partial(chunked_attention, chunk=chunk)
        return _per_device(run, q, k, v, segment_ids)
    return _per_device(KERNELS[choice.name].run, q, k, v, segment_ids if packed else None)


def _per_device(run: Callable, q: Array, k: Array, v: Array, *by_token: Array | None) -> Array:
    """Runs attention on each device's rows of the batch and its own heads.

    Kernels the partitioner cannot split, and the chunked loops it would. Where there are fewer
    key-value heads than devices that share heads, all have them whole and each takes the one that
    its query heads read.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(q, k, v, *by_token)
    rows = next(iter(rows_spec(q.shape[0], mesh)), None)
    kv_heads, group = q.shape[2:4]
    parts = mesh.shape["tensor"]
    ids = P(rows)
    facts = (ids,) * len(by_token)
    if kv_heads % parts == 0:
        heads = P(rows, None, "tensor")
        mapped = jax.shard_map(
            run, in_specs=(heads, heads, heads, *facts), out_specs=heads, check_vma=False
        )
        return mapped(q, k, v, *by_token)
    if parts % kv_heads or (kv_heads * group) % parts:
        mapped = jax.shard_map(run, in_specs=(*(ids,) * 3, *facts), out_specs=ids, check_vma=False)
        return mapped(q, k, v, *by_token)

    def on_one_head(q, k, v, *by_token):
        own = jax.lax.axis_index("tensor") * kv_heads // parts
        k, v = (jax.lax.dynamic_slice_in_dim(x, own, 1, axis=2) for x in (k, v))
        return run(q[:, :, None], k, v, *by_token)[:, :, 0]

    heads = P(rows, None, "tensor")
    mapped = jax.shard_map(
        on_one_head, in_specs=(heads, ids, ids, *facts), out_specs=heads, check_vma=False
    )
    flat = q.reshape(*q.shape[:2], -1, q.shape[-1])
    return mapped(flat, k, v, *by_token).reshape(q.shape)


def _pad(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
    """Appends `value` along `axis` up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value)


def splash_block(length: int) -> int:
    """Block of queries and keys: the largest for which padding adds at most an eighth."""
    for block in (512, 256):
        if -length % block <= length // 8:
            return block
    return LANES


def splash(
    q: Float[Array, "B T K G h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T K G h"]:
    """JAX's splash attention, a Pallas kernel for TPU with its own backward kernels.

    Heads are widened with zeros to whole lanes, which the memory layout does anyway: they add
    nothing to logits, and outputs and gradients beyond the true width are cut off. Added positions
    are a document of their own, after all others.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    batch, length, kv_heads, group, width = q.shape
    block = splash_block(length)
    q = (q * jnp.asarray(width**-0.5, q.dtype)).reshape(batch, length, kv_heads * group, width)
    q, k, v = (_pad(_pad(jnp.swapaxes(x, 1, 2), 2, block), 3, LANES) for x in (q, k, v))
    if segment_ids is not None:
        segment_ids = _pad(segment_ids, 1, block, value=-1)
        segment_ids = kernels.SegmentIds(q=segment_ids, kv=segment_ids)
    mask = masks.MultiHeadMask([masks.CausalMask(2 * q.shape[2:3])] * q.shape[1])
    kernel = kernels.make_splash_mha_single_device(
        mask,
        block_sizes=kernels.BlockSizes(
            **dict.fromkeys(
                ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"),
                block,
            )
        ),
        residual_checkpoint_name=SAVED_NAMES[0],
        interpret=interpret,
    )
    out = jax.vmap(kernel)(q, k, v, segment_ids)
    out = jnp.swapaxes(out, 1, 2)[:, :length, :, :width]
    return out.reshape(batch, length, kv_heads, group, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tagged(kernel: Callable, q: Array, k: Array, v: Array) -> Array:
    """`kernel(q, k, v)`, with what its backward pass needs under the names a remat policy keeps.

    Without the names the recomputation of a block would run the kernel's forward pass again.
    """
    return kernel(q, k, v)


def _tagged_forward(kernel, q, k, v):
    out, pull_back = jax.vjp(kernel, q, k, v)
    tagged_out = checkpoint_name(out, SAVED_NAMES[0])

    def tag(residual):
        if residual is out:
            return tagged_out
        if any(residual is x for x in (q, k, v)):
            return residual  # recomputed, as in the other implementations
        return checkpoint_name(residual, SAVED_NAMES[1])

    return tagged_out, jax.tree.map(tag, pull_back)


tagged.defvjp(_tagged_forward, lambda kernel, pull_back, d_out: pull_back(d_out))


def _dot_product(
    kernel: Callable, multiple: int, q: Array, k: Array, v: Array, segment_ids: None
) -> Array:
    """Calls a kernel of the form of `jax.nn.dot_product_attention` on rows of one document."""
    del segment_ids
    width = q.shape[-1]
    heads = (*q.shape[:2], -1, width)
    padded = (_pad(x.reshape(heads), 3, multiple) for x in (q, k, v))
    kernel = functools.partial(kernel, scale=width**-0.5, is_causal=True)
    return tagged(kernel, *padded)[..., :width].reshape(q.shape)


def cudnn(q: Array, k: Array, v: Array, segment_ids: None) -> Array:
    """cuDNN's flash attention through JAX; it takes widths that are multiples of 8."""
    kernel = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return _dot_product(kernel, 8, q, k, v, segment_ids)


def tokamax(q: Array, k: Array, v: Array, segment_ids: None) -> Array:
    """tokamax's GPU kernels, which pad heads themselves; its quadratic fallback is left out."""
    from tokamax import dot_product_attention

    kernel = functools.partial(dot_product_attention, implementation=("mosaic", "triton"))
    return _dot_product(kernel, 1, q, k, v, segment_ids)


def _splash_refusal(case: Case) -> str | None:
    if case.dtype != jnp.bfloat16:
        return f"takes bfloat16: it does not promise {case.dtype} products of {case.dtype}"
    return None


def _cudnn_refusal(case: Case) -> str | None:
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {case.dtype}"
    if case.head_dim > 128:
        return f"takes heads up to 128 wide on every GPU, not {case.head_dim}"
    if case.packed:
        return "takes no document ids, and rows are packed"
    return None


def _tokamax_refusal(case: Case) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "is not installed"
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {case.dtype}"
    if case.packed:
        return "isolates documents only by a mask of length squared, and rows are packed"
    return None


class Kernel(NamedTuple):
    """A fused kernel.

    Attributes:
        platform: Where it runs.
        multiple: Head widths are padded to a multiple of it.
        about: What it is, for the reason of a choice.
        refusal: Why it does not serve a case, or None.
        run: `(q, k, v, segment_ids or None) -> out`, shaped as in `attend`.
    """

    platform: str
    multiple: int
    about: str
    refusal: Callable[[Case], str | None]
    run: Callable[..., Array]


# In the order in which "auto" tries them.
KERNELS = {
    "splash": Kernel("tpu", LANES, "fused, isolates documents", _splash_refusal, splash),
    "cudnn": Kernel("gpu", 8, "fused, rows of one document", _cudnn_refusal, cudnn),
    "tokamax": Kernel("gpu", 1, "fused, rows of one document", _tokamax_refusal, tokamax),
}


def _serves(kernel: Kernel, case: Case) -> str:
    padded = case.head_dim + -case.head_dim % kernel.multiple
    if padded == case.head_dim:
        return kernel.about
    return f"{kernel.about}; heads of {case.head_dim} padded with zeros to {padded}"
