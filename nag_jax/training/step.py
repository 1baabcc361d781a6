"""One optimizer step as one jitted function, and the step of evaluation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from nag_jax.models.transformer import LanguageModel
from nag_jax.optim.diagnostics import diagnostics, failures
from nag_jax.sharding import rules
from nag_jax.training.state import TrainState, abstract_state

Batch = dict[str, jax.Array]


def batch_sums(
    model: LanguageModel, params: Any, balance: Any, batch: Batch, step: jax.Array, taps: bool
) -> dict[str, Any]:
    """What a (micro-)batch adds to the step: sums, never means, so that any split adds up alike."""
    out = model.evaluate_batch(params, batch, step, taps, balance)
    return {
        "nats": jnp.sum(out["nats"]),
        "correct": jnp.sum(out["correct"]),
        "tokens": jnp.sum(batch["valid"][:, 1:].astype(jnp.float32)),
        "auxiliary_loss": out["auxiliary_loss"],
        "taps": out["taps"],
        "statistics": out["statistics"],
    }


def train_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    steps: int,
    accumulation: int,
    taps: bool,
    skip_not_finite: bool,
    optimizer_diagnostics: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """Builds the function of one optimizer step.

    Gradients are summed over micro-batches and divided once by the number of valid targets of the
    global batch, so that a micro-batch with fewer tokens counts for less. All micro-batches read
    the same balance, which is updated once, from their summed statistics.

    Args:
        model: The model.
        optimizer: The optimizer.
        schedule: Learning rate by step, for the metrics.
        steps: Optimizer steps of the whole run.
        accumulation: Micro-batches per step; divides the batch's rows.
        taps: Whether sub-layers measure themselves.
        skip_not_finite: Whether a step whose loss, gradient or new parameters are not finite
            changes nothing but the step count.
        optimizer_diagnostics: Whether the numbers of `nag_jax.optim.diagnostics` are metrics.

    Returns:
        (state, batch) -> (state, metrics): loss in nats per token, accuracy, valid tokens, norms of
        gradient, update and parameters, rate, whether all was finite, the mean taps by sub-layer
        and, where there are such, the auxiliary loss in nats per token, what the update of the
        balance tells by layer, and what the optimizer counts or tells.
    """

    def loss(params, micro_batch, balance, age):
        sums = batch_sums(model, params, balance, micro_batch, age, taps)
        if sums["auxiliary_loss"] is None:
            return sums["nats"], sums
        return sums["nats"] + sums["auxiliary_loss"], sums

    def step_function(state: TrainState, batch: Batch):
        gradient_of = jax.grad(loss, has_aux=True)
        if accumulation == 1:
            gradient, sums = gradient_of(state.params, batch, state.balance, state.age)
        else:
            micro_batches = jax.tree.map(
                lambda x: rules.constrain(
                    x.reshape(accumulation, -1, *x.shape[1:]),
                    None,
                    "batch",
                    *(None,) * (x.ndim - 1),
                ),
                batch,
            )

            def add(total, micro_batch):
                new = gradient_of(state.params, micro_batch, state.balance, state.age)
                return jax.tree.map(jnp.add, total, new), None

            shapes = jax.eval_shape(
                gradient_of,
                state.params,
                jax.tree.map(lambda x: x[0], micro_batches),
                state.balance,
                state.age,
            )
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            (gradient, sums), _ = jax.lax.scan(add, zeros, micro_batches)

        tokens = jnp.maximum(sums["tokens"], 1)
        gradient = jax.tree.map(lambda g: g / tokens, gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": sums["nats"] / tokens,
            "accuracy": sums["correct"] / tokens,
            "tokens": sums["tokens"],
            "gradient_norm": optax.tree.norm(gradient),
            "update_norm": optax.tree.norm(updates),
            "parameter_norm": optax.tree.norm(params),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "taps": jax.tree.map(lambda tap: tap / tokens, sums["taps"]),
        }
        told = failures(opt_state)
        if optimizer_diagnostics:
            told |= diagnostics(updates, params, opt_state, model.infos)
        if told:
            metrics["optimizer"] = told
        balance = state.balance
        if balance:
            balance, told = model.update_balance(balance, sums["statistics"], state.step / steps)
            metrics["balance"] = told
        if sums["auxiliary_loss"] is not None:
            metrics["auxiliary_loss"] = sums["auxiliary_loss"] / tokens
        # The parameters too: a finite gradient can lead to parameters that are not, and a state
        # with them must be neither saved nor gone on from.
        finite = jnp.all(
            jnp.isfinite(
                jnp.stack([metrics[x] for x in ("loss", "gradient_norm", "parameter_norm")])
            )
        )
        metrics["finite"] = finite.astype(jnp.float32)
        if skip_not_finite:
            params, opt_state, balance = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, opt_state, balance),
                (state.params, state.opt_state, state.balance),
            )
        new = TrainState(params, opt_state, balance, state.step + 1, state.age + 1)
        return new, metrics

    return step_function


def configured_step(
    config: ConfigDict,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> Callable:
    """Returns `train_step` as a complete config wants it."""
    return train_step(
        model,
        optimizer,
        schedule,
        steps=config.train.steps,
        accumulation=config.train.accumulation,
        taps=config.train.taps,
        skip_not_finite=config.train.nan_policy == "skip",
        optimizer_diagnostics=config.train.optimizer_diagnostics,
    )


def jit_train_step(
    step_function: Callable,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """Compiles a step function for a mesh; the state is donated and keeps its shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh))
    return jax.jit(
        step_function,
        in_shardings=(shardings, rules.batch_sharding(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
