"""What a model costs: parameters by role, FLOPs per token, and an estimate of memory per device.

Everything is read from the parameters' records and the config, so nothing is compiled and a module
of a user's own is counted by the parameters that it declares. FLOPs are those of the products that
the mathematics needs: multiply and add count one each, attention is causal, padding of the
vocabulary, norms, activations and recomputation count nothing.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict
from rich.filesize import decimal

from nag_jax.kinds import kind_class
from nag_jax.models.losses import chunk_rows
from nag_jax.models.stages import StageSizes, pattern_of, stages_of
from nag_jax.parameters import STACK_AXIS, ParamInfo, flatten
from nag_jax.sharding.rules import batch_shards, parameter_spec, use_spec

# Backward through a product costs two products of its size: by the weight and by the input.
TRAINING_FACTOR = 3

# Calibrated on compiled programs (see `memory_estimate`).
_KEEP_ALL = 2.2
_WORKSPACE = 4.0
_SCORE_COPIES = 2
_LOGIT_COPIES = 3


def forward_flops(
    infos: Mapping[str, Any],
    config: ConfigDict,
    vocab_size: int,
    row_length: int | None = None,
) -> dict[str, float]:
    """Returns forward FLOPs per token by part of the model.

    A product of a token with a weight costs twice the weight's size. The parts are "<sub-layer>"
    for the weights of each kind of sub-layer, "attention context" for products of queries with keys
    and of probabilities with values, averaged over the `row_length` causal positions of a row that
    holds one document (where the attention's kind says it, by `context_flops`), "gates", "routers",
    "convolutions" and "decode"; looking an embedding up costs nothing. Of experts those count that
    a token chooses.

    Args:
        infos: Nested dict of `ParamInfo`.
        config: The complete config.
        vocab_size: True size of the vocabulary.
        row_length: Length of the row, if not the config's.
    """
    parts: defaultdict[str, float] = defaultdict(float)
    for product in weight_products(infos, config):
        parts[product.part] += product.flops
    kind = kind_class("model.attention", config.model.attention.kind)
    if hasattr(kind, "context_flops"):
        runs = sum(stage.runs for stage in stages_of(config.model).values())
        length = config.data.row_length if row_length is None else row_length
        parts["attention context"] += runs * kind.context_flops(config.model.attention, length)
    parts["decode"] += 2 * config.model.d_model * vocab_size
    return dict(parts)


class Product(NamedTuple):
    """Products of tokens with one parameter: its path, its part in `forward_flops`, FLOPs."""

    path: str
    part: str
    flops: float


def weight_products(infos: Mapping[str, Any], config: ConfigDict) -> Iterator[Product]:
    """Yields the forward FLOPs per token of each parameter that tokens are multiplied with."""
    stages = stages_of(config.model)
    for path, info in flatten(infos).items():
        flops = 2 * info.size * _loops(path, stages) * _active_share(path, info, config)
        if info.role == "matrix":
            yield Product(path, _sublayer(path), flops)
        elif info.role == "gate" and "embed" in info.axes:  # alpha, beta, p, b are elementwise
            yield Product(path, "gates", flops)
        elif info.role == "router" and len(info.axes) > 2:  # biases are elementwise
            yield Product(path, "routers", flops)
        elif info.role == "conv":
            yield Product(path, "convolutions", flops)


def training_flops(infos: Mapping[str, Any], config: ConfigDict, vocab_size: int) -> float:
    """Returns FLOPs per token of a training step: three forward passes, without recomputation."""
    return TRAINING_FACTOR * sum(forward_flops(infos, config, vocab_size).values())


def parameters_by_role(infos: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    """Returns the number of parameters of each role, without the vocabulary's padding."""
    roles: defaultdict[str, int] = defaultdict(int)
    for info in flatten(infos).values():
        roles[info.role] += _true_size(info, vocab_size)
    return dict(roles)


def active_parameters(infos: Mapping[str, Any], config: ConfigDict, vocab_size: int) -> int:
    """Returns how many parameters one token's forward pass reads.

    A tied table is read whole by the decode; beside a free head a token reads its own row only.
    """
    flat = flatten(infos)
    free_head = any(info.role == "head" for info in flat.values())
    total = 0
    for path, info in flat.items():
        size = round(_true_size(info, vocab_size) * _active_share(path, info, config))
        total += size // vocab_size if free_head and info.role == "embedding" else size
    return total


def memory_estimate(
    infos: Mapping[str, Any],
    config: ConfigDict,
    optimizer_state: Any,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Returns an estimate of a training step's memory on each device, in bytes by purpose.

    Parameters and gradients are exact; optimizer state is taken to be divided as they are, on
    average. What tensor parallelism splits is not subtracted from activations. With n tokens a
    micro-batch on a device, c bytes a number of the compute dtype, and per token of a block: w
    outputs of weight products, q inputs of attention's output projection, v outputs of
    convolutions, d the stream,

        kept per block = n c d                    remat "nothing_saveable"
                         n c (d + w + q)          the policies that keep products of weights
                         2.2 n c (d + w + q + v)  "none"
        workspace      = 4 n c (w + v)  (one block's backward pass: intermediates and their
                         cotangents)
                         + two chunks of attention scores + three chunks of logits, in float32

    The constants fit XLA's own memory analysis on CPU, mostly within a quarter; the compiler of
    another device may differ more.

    Args:
        infos: Nested dict of `ParamInfo`.
        config: The complete config.
        optimizer_state: Pytree with `shape` and `dtype`, such as `jax.eval_shape(optimizer.init,
            params)`.
        mesh: Mesh with the axes of `sharding.rules.MESH_AXES`; None for one device.
    """
    flat = flatten(infos)
    whole = parameters = 0
    for path, info in flat.items():
        itemsize = jnp.dtype(info.dtype).itemsize
        shape = info.shape
        if mesh is not None:
            shape = NamedSharding(mesh, parameter_spec(info, mesh, path)).shard_shape(shape)
        whole += itemsize * info.size
        parameters += itemsize * math.prod(shape)
    state = sum(
        leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(optimizer_state)
    )

    model, rows = config.model, config.train.batch_size / config.train.accumulation
    rows /= 1 if mesh is None else batch_shards(mesh)
    length = config.data.row_length
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    stages = stages_of(model)
    outputs = attention_output = convolved = 0.0  # numbers per token, over all blocks
    for path, info in flat.items():
        if info.axes[:1] != (STACK_AXIS,):
            continue
        runs = info.shape[0] * _loops(path, stages)
        if info.role == "matrix":
            count = _outputs_by_token(path, info, config, mesh)
            outputs += runs * count * math.prod(info.shape[i] for i in info.columns)
            if _sublayer(path) == "attention" and info.columns == (info.axes.index("embed"),):
                attention_output += runs * math.prod(info.shape[i] for i in info.rows)
        elif info.role == "gate" and "embed" in info.axes:
            outputs += runs * info.size // info.shape[0] // model.d_model
        elif info.role == "conv":  # an axis named twice is the inputs' and the outputs'
            sizes = dict(zip(info.axes, info.shape, strict=True))
            convolved += runs * math.prod(sizes.values()) // sizes["lags"] // sizes[STACK_AXIS]
    blocks_run = sum(stage.runs for stage in stages.values())
    stream = blocks_run * model.d_model
    kept = {
        "nothing_saveable": stream,
        "none": _KEEP_ALL * (stream + outputs + attention_output + convolved),
    }.get(model.remat, stream + outputs + attention_output)
    padded = next(info.shape[0] for info in flat.values() if info.role == "embedding")
    workspace = _WORKSPACE * itemsize * rows * length * (outputs + convolved) / blocks_run
    logits = rows * length * chunk_rows(padded, model.loss_chunk)
    workspace += _LOGIT_COPIES * 4 * logits
    attention = model.attention
    if "query_chunk" in attention:
        scores = attention.num_heads * min(attention.query_chunk, length) * length
        workspace += _SCORE_COPIES * 4 * rows * scores
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer state": state * parameters / max(whole, 1),
        "kept activations": itemsize * rows * length * kept,
        "workspace": workspace,
    }


def weight_traffic(
    infos: Mapping[str, Any], config: ConfigDict, tokens: float, mesh: Mesh
) -> float:
    """Returns how many bytes of weights a device moves at the least in one forward pass.

    It reads its part of each parameter once for each run of the layer. A parameter that is whole
    along the width where it is used, but not where it is stored, is also written and read as it is
    used, in the compute dtype. Of experts that are not gathered so, no more are read than tokens
    can choose. Beside a free head the embedding's table is not read.

    Args:
        infos: Nested dict of `ParamInfo`.
        config: The complete config.
        tokens: Tokens of the pass on all devices.
        mesh: Mesh with the axes of `sharding.rules.MESH_AXES`.
    """
    flat, stages = flatten(infos), stages_of(config.model)
    free_head = any(info.role == "head" for info in flat.values())
    itemsize = jnp.dtype(config.model.compute_dtype).itemsize
    total = 0.0
    for path, info in flat.items():
        if free_head and info.role == "embedding":
            continue
        specs = parameter_spec(info, mesh, path), use_spec(info.axes, info.shape, mesh)
        stored, used = (
            math.prod(NamedSharding(mesh, spec).shard_shape(info.shape)) for spec in specs
        )
        size = jnp.dtype(info.dtype).itemsize * stored
        if used > stored:
            size += 2 * itemsize * used
        else:
            seen = tokens / batch_shards(mesh)
            if "expert" in specs[1]:  # other devices' tokens come to this one's experts
                seen *= mesh.shape["expert"]
            size *= min(1, seen * _active_share(path, info, config))
        total += size * _loops(path, stages)
    return total


def model_table(
    infos: Mapping[str, Any],
    config: ConfigDict,
    vocab_size: int,
    optimizer_state: Any = None,
    mesh: Mesh | None = None,
) -> list[tuple[str, str]]:
    """Returns (quantity, value) rows for the header that a run or a plan prints.

    Rows of parts are indented by two spaces under their total. Arguments as in `memory_estimate`,
    and the true size of the vocabulary. Without an optimizer's state nothing is told of training.
    """
    roles = parameters_by_role(infos, vocab_size)
    flops = forward_flops(infos, config, vocab_size)
    rows = [("parameters", _si(sum(roles.values())))]
    rows += [(f"  {role}", _si(count)) for role, count in _largest_first(roles)]
    rows += [("  active per token", _si(active_parameters(infos, config, vocab_size)))]
    rows += [("forward FLOPs per token", _si(sum(flops.values())))]
    rows += [(f"  {part}", _si(count)) for part, count in _largest_first(flops)]
    if optimizer_state is None:
        return rows
    memory = memory_estimate(infos, config, optimizer_state, mesh)
    rows += [("training FLOPs per token", _si(TRAINING_FACTOR * sum(flops.values())))]
    rows += [("memory per device, estimated", decimal(round(sum(memory.values()))))]
    rows += [(f"  {purpose}", decimal(round(size))) for purpose, size in memory.items()]
    return rows


def _sublayer(path: str) -> str:
    """Name of the sub-layer that a stacked parameter belongs to, else its top-level module."""
    names = path.split("/")
    return names[2] if names[0].startswith("stage_") else names[0]


def _outputs_by_token(path: str, info: ParamInfo, config: ConfigDict, mesh: Mesh | None) -> float:
    """How many rows a matrix has room for, for each of a device's tokens.

    One; of experts the k that a token chooses, and over an expert axis of D devices the worst case:
    all D devices' tokens choosing this one's experts.
    """
    if "expert" not in info.axes:
        return 1.0
    experts = info.shape[info.axes.index("expert")]
    chosen = experts * _active_share(path, info, config)
    devices = 1 if mesh is None else mesh.shape["expert"]
    if devices == 1 or experts % devices:
        return chosen
    return devices * min(chosen, experts // devices)


def _active_share(path: str, info: ParamInfo, config: ConfigDict) -> float:
    """The part of a parameter that a token uses: of experts, what their kind says, if it does."""
    if "expert" not in info.axes or not path.startswith("stage_"):
        return 1.0
    stage, block, sublayer = path.split("/")[:3]
    sizes = stages_of(config.model)[stage]
    position = sizes.positions[sizes.block_names.index(block)]
    options = pattern_of(config.model)[position][sublayer]
    kind = kind_class(f"model.{sublayer}", options.kind)
    return kind.active_share(options) if hasattr(kind, "active_share") else 1.0


def _loops(path: str, stages: Mapping[str, StageSizes]) -> int:
    """How often a parameter's stage runs."""
    stage = path.split("/")[0]
    return stages[stage].loops if stage in stages else 1


def _true_size(info: ParamInfo, vocab_size: int) -> int:
    if "vocabulary" not in info.axes:
        return info.size
    return info.size // info.shape[info.axes.index("vocabulary")] * vocab_size


def _largest_first(counts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _si(number: float) -> str:
    """Three significant digits with k, M, G, T."""
    for factor, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.3g}"
