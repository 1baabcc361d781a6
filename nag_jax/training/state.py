"""What a run carries from step to step, how it starts, and where it lives on a mesh."""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nag_jax.models.transformer import LanguageModel
from nag_jax.optim import state_like_params
from nag_jax.sharding import rules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The whole state of a run on devices.

    Attributes:
        params: Parameters, nested dicts of float32 arrays.
        opt_state: State of the optimizer's chain.
        balance: State that is neither: read by the forward pass and updated once per optimizer step
            from summed statistics. Empty for models without such parts.
        step: Optimizer steps done, int32.
        age: Optimizer steps behind the parameters, those of runs that this one started from
            included, int32; the warm-up of gains goes by it.
    """

    params: dict[str, Any]
    opt_state: Any
    balance: dict[str, Any]
    step: jax.Array
    age: jax.Array


def purpose_key(seed: int, step: int, purpose: str) -> jax.Array:
    """A random key that is a function of (seed, step, purpose) alone; no other RNG state exists."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.fold_in(key, zlib.crc32(purpose.encode()))


def initial_state(
    model: LanguageModel, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Fresh parameters and optimizer state; a pure function of the seed."""
    params = model.init(purpose_key(seed, 0, "init"))
    zero = jnp.zeros((), jnp.int32)
    balance = model.initial_balance()
    return TrainState(params, optimizer.init(params), balance, step=zero, age=zero)


def abstract_params(model: LanguageModel, mesh: Mesh, dtype: Any = None) -> dict[str, Any]:
    """Shapes, dtypes and shardings of the parameters on a mesh.

    Args:
        model: The model.
        mesh: Where they go.
        dtype: Dtype instead of the stored one.
    """
    shardings = rules.parameter_shardings(model.infos, mesh)
    return jax.tree.map(
        lambda info, sharding: jax.ShapeDtypeStruct(
            info.shape, dtype or info.dtype, sharding=sharding
        ),
        model.infos,
        shardings,
    )


def abstract_balance(model: LanguageModel, mesh: Mesh) -> dict[str, Any]:
    """Shapes, dtypes and shardings of the balance: whole on every device."""
    whole = NamedSharding(mesh, P())
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        model.balance_shapes,
    )


def abstract_state(
    model: LanguageModel, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes, dtypes and shardings of the whole state on a mesh.

    Optimizer state that mirrors a parameter is split like it, what is made of one over the same
    axes of the mesh; everything else is whole everywhere.
    """
    params = abstract_params(model, mesh)
    shapes = jax.eval_shape(lambda: initial_state(model, optimizer, 0))
    whole = NamedSharding(mesh, P())
    shardings = state_like_params(
        optimizer,
        params,
        jax.tree.map(lambda leaf: leaf.sharding, params),
        whole,
        rules.derived_sharding,
    )
    opt_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes.opt_state,
        shardings,
    )
    counter = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    balance = abstract_balance(model, mesh)
    return TrainState(params, opt_state, balance, step=counter, age=counter)


def initialise(
    model: LanguageModel, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh
) -> TrainState:
    """Makes the initial state directly in its place on the mesh, without a whole copy anywhere."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh))
    with jax.set_mesh(mesh):
        return jax.jit(lambda: initial_state(model, optimizer, seed), out_shardings=shardings)()
