"""Brings rows to the devices that hold their experts, and the results back.

Everything here runs inside `shard_map`: each device sees its own rows and its own experts. What an
expert computes, and who chose it, comes from outside.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from nag_jax.errors import UserError
from nag_jax.models.rows import collect_rows, gather_rows, sort_by_group
from nag_jax.parameters import info_of
from nag_jax.sharding.rules import BATCH_AXES, batch_shards, parameter_spec

# (weights of the local experts, rows [N, d] sorted by expert, rows of each) -> [N, d]
ExpertFunction = Callable[[dict[str, Array], Array, Array], Array]


class Choice(NamedTuple):
    """How rows reach their experts, and why so.

    Attributes:
        name: "gather", "ragged", or "local" where every device holds all experts.
        reason: Why, in a few words.
    """

    name: str
    reason: str

    @property
    def row(self) -> tuple[str, str, str]:
        """(operation, implementation, reason), for the header of a run."""
        return "exchange with experts", self.name, self.reason


def choose(requested: str, platform: str, shards: int | None = None) -> Choice:
    """Names the exchange for `run_experts` and says why.

    Args:
        requested: "auto", "gather" or "ragged".
        platform: "cpu", "gpu" or "tpu".
        shards: Length of the mesh's expert axis, where known.

    Returns:
        The choice; "auto" is "ragged" where the platform has it. `run_experts` does neither where
        the experts or the rows of a batch do not divide the devices.

    Raises:
        UserError: If "ragged" is asked for on CPU.
    """
    if shards == 1:
        return Choice("local", "every device holds all experts")
    if requested == "ragged" and platform == "cpu":
        raise UserError(
            "model.feedforward.exchange=ragged does not run on CPU, where XLA has no "
            "ragged_all_to_all; allowed there: auto, gather"
        )
    if requested != "auto":
        return Choice(requested, "asked for")
    if platform == "cpu":
        return Choice("gather", "no ragged_all_to_all on CPU")
    return Choice("ragged", "each row goes to its expert's device alone")


def run_experts(
    expert_function: ExpertFunction,
    weights: Mapping[str, nnx.Param],
    x: Float[Array, "B T d"],
    chosen: Int[Array, "B T k"],
    shares: Float[Array, "B T k"],
    *,
    exchange: str,
) -> Float[Array, "B T d"]:
    """y = sum_j shares_j * expert_{chosen_j}(x), for every token.

    Weights are stored split over expert, fsdp and tensor; each device gathers over fsdp those of
    its own experts, in the dtype of `x`, and the gradient is scattered likewise. With D devices on
    the expert axis, T tokens on each of them and L experts each, nothing is dropped, so buffers are
    made for the worst case: a device may have to run T D min(k, L) rows (the cost of products
    follows the rows there are).

    - "gather" sends all tokens to all D devices and sums the results where the tokens live:
      T D d values each way, whatever k.
    - "ragged" sends each row to the device of its expert and back: T k d values each way. Besides
      the rows that are run it holds T k sorted ones.

    Where the rows of the batch do not divide the devices, every device has all tokens, runs its own
    experts on them, and the results are summed.

    Args:
        expert_function: Runs the device's experts on rows sorted by expert. Rows past the sum of
            the sizes must come out zero. Where the hidden axis is split, its result is a part of a
            sum over tensor.
        weights: Parameters whose first axis is "expert".
        x: Tokens, in the compute dtype.
        chosen: int32 experts of each token, no expert twice; the number of experts means none.
        shares: Factor of each choice.
        exchange: "gather" or "ragged".

    Returns:
        The sums, in `x`'s dtype.
    """
    num_experts = next(iter(weights.values())).shape[0]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        local = {name: weight[...].astype(x.dtype) for name, weight in weights.items()}
        return _by_token(_run_local, x, chosen, shares, expert_function, local, num_experts)
    specs = {
        name: parameter_spec(info_of(weight, name), mesh, name) for name, weight in weights.items()
    }
    used = {axis for spec in specs.values() for axis in spec}
    devices = mesh.shape["expert"] if "expert" in used else 1
    divides = x.shape[0] % batch_shards(mesh) == 0
    if devices == 1:
        run = _run_local
    elif divides:
        run = {"gather": _run_gathered, "ragged": _run_ragged}[exchange]
    else:
        run = _run_own

    def on_each_device(weights, x, chosen, shares):
        local = {name: _gather_fsdp(w.astype(x.dtype), specs[name]) for name, w in weights.items()}
        y = _by_token(run, x, chosen, shares, expert_function, local, num_experts // devices)
        return y[None]

    # What is to be summed comes out side by side and is summed outside, where the transpose is a
    # copy: inside, the transpose of a sum would be another sum over the devices.
    summed = tuple(
        axis
        for axis, needed in (("expert", devices > 1 and not divides), ("tensor", "tensor" in used))
        if needed
    )
    rows = P(BATCH_AXES) if divides else P()
    mapped = jax.shard_map(
        on_each_device,
        in_specs=(specs, rows, rows, rows),
        out_specs=P(summed or None, *rows),
        check_vma=False,
    )
    parts = mapped({name: weight[...] for name, weight in weights.items()}, x, chosen, shares)
    return jax.lax.reduce_sum(parts, (0,))  # in its dtype, where jnp.sum would send float32


def _by_token(run: Callable, x: Array, chosen: Array, shares: Array, *rest) -> Array:
    """Calls `run` with batch and time as one axis of tokens."""
    k = chosen.shape[-1]
    y = run(x.reshape(-1, x.shape[-1]), chosen.reshape(-1, k), shares.reshape(-1, k), *rest)
    return y.reshape(x.shape)


def _gather_fsdp(w: Array, spec: P) -> Array:
    """The device's experts whole along the axis that is stored over fsdp."""
    for axis, name in enumerate(spec):
        if name == "fsdp":
            w = jax.lax.all_gather(w, "fsdp", axis=axis, tiled=True)
    return w


def _run_local(
    x: Float[Array, "T d"],
    groups: Int[Array, "T k"],
    shares: Float[Array, "T k"],
    expert_function: ExpertFunction,
    weights: dict[str, Array],
    num_groups: int,
) -> Float[Array, "T d"]:
    """Runs the experts that are here; `num_groups` and above mean none of them."""
    sorting = sort_by_group(groups.reshape(-1), num_groups)
    # A token chooses no expert twice, so no more rows than these can be for the experts here.
    order = sorting.order[: x.shape[0] * min(groups.shape[1], num_groups)]
    rows = gather_rows(x, order, sorting.places)
    rows = expert_function(weights, rows, sorting.group_sizes)
    return _combine(collect_rows(rows, order, sorting.places), shares)


def _combine(choices: Float[Array, "Tk d"], shares: Float[Array, "T k"]) -> Float[Array, "T d"]:
    """Sums the choices of each token by their shares, in float32 at least."""
    wide = jnp.promote_types(choices.dtype, jnp.float32)
    by_token = choices.reshape(*shares.shape, -1).astype(wide)
    return jnp.sum(shares[..., None].astype(wide) * by_token, axis=1).astype(choices.dtype)


def _run_own(
    x: Array, chosen: Array, shares: Array, expert_function: ExpertFunction, weights: dict, own: int
) -> Array:
    """This device's part of the sum for tokens that every device of the expert axis has."""
    groups = chosen - jax.lax.axis_index("expert") * own
    groups = jnp.where((groups >= 0) & (groups < own), groups, own)
    return _run_local(x, groups, shares, expert_function, weights, own)


def _run_gathered(x: Array, chosen: Array, shares: Array, *rest) -> Array:
    """All tokens to all devices of the expert axis, and the sums back to the tokens' devices."""
    x, chosen, shares = (
        jax.lax.all_gather(array, "expert", tiled=True) for array in (x, chosen, shares)
    )
    return jax.lax.psum_scatter(_run_own(x, chosen, shares, *rest), "expert", tiled=True)


def _run_ragged(
    x: Array, chosen: Array, shares: Array, expert_function: ExpertFunction, weights: dict, own: int
) -> Array:
    """Each row to the device of its expert, and its result back."""
    devices = jax.lax.axis_size("expert")
    sorting = sort_by_group(chosen.reshape(-1), devices * own)
    sizes = jax.lax.all_gather(sorting.group_sizes, "expert")
    there, back = routes(sizes, jax.lax.axis_index("expert"))
    rows = gather_rows(x, sorting.order, sorting.places)
    most = devices * x.shape[0] * min(chosen.shape[1], own)
    arrived = _exchange(rows, there, back, most)
    arrived = expert_function(weights, arrived, there.received.reshape(devices, own).sum(0))
    rows = _exchange(arrived, back, there, rows.shape[0])
    return _combine(collect_rows(rows, sorting.order, sorting.places), shares)


class Route(NamedTuple):
    """The pieces of an exchange as `ragged_all_to_all` wants them, L pieces for each device.

    Attributes:
        starts: int32 [D L], where each piece begins here.
        sent: int32 [D L], its rows.
        targets: int32 [D L], where it begins on the device it goes to.
        received: int32 [D L], rows of the pieces that come here, L from each device.
    """

    starts: Array
    sent: Array
    targets: Array
    received: Array


def routes(sizes: Int[Array, "D E"], device: Int[Array, ""]) -> tuple[Route, Route]:
    """The way of a device's rows to their experts' devices, and the way of results back.

    A piece is what one device has for one expert. On arrival rows are sorted by expert, and within
    an expert by the device they come from; so nothing is sorted again.

    Args:
        sizes: How many rows each device has for each expert; its own rows are sorted by expert.
        device: This device, which holds experts `device * E / D` and on.

    Returns:
        There and back.
    """
    devices, experts = sizes.shape
    own = experts // devices

    def before(x, axis):
        return jnp.cumsum(x, axis) - x

    first = before(sizes.sum(0).reshape(devices, own), 1).reshape(experts)
    landing = first + before(sizes, 0)
    starts = before(sizes, 1)

    def of_own_experts(x):
        return jax.lax.dynamic_slice_in_dim(x, device * own, own, 1).reshape(-1)

    sent, received = sizes[device], of_own_experts(sizes)
    there = Route(starts[device], sent, landing[device], received)
    back = Route(of_own_experts(landing), received, of_own_experts(starts), sent)
    return there, back


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _exchange(rows: Array, route: Route, way_back: Route, size: int) -> Array:
    """Exchanges rows over expert into an array of `size` rows, zero where none arrives.

    The transpose is the same on the way back: JAX's own would exchange the offsets once more.
    """
    empty = jnp.zeros((size, rows.shape[1]), rows.dtype)
    return jax.lax.ragged_all_to_all(
        rows, empty, route.starts, route.sent, route.targets, route.received, axis_name="expert"
    )


def _exchange_forward(rows, route, way_back, size):
    return _exchange(rows, route, way_back, size), (route, way_back, rows.shape[0])


def _exchange_backward(size, residuals, d_arrived):
    route, way_back, size_back = residuals
    return _exchange(d_arrived, way_back, route, size_back), None, None


_exchange.defvjp(_exchange_forward, _exchange_backward)
