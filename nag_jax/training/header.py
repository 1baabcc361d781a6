"""What a run says of itself before its first step: model, cost, mesh, implementations."""

import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from nag_jax.analysis.flops import model_table
from nag_jax.kinds import kind_class
from nag_jax.models.stages import blocks_in_words
from nag_jax.models.transformer import LanguageModel
from nag_jax.training.state import abstract_state


def implementations(config: ConfigDict) -> list[tuple[str, str, str]]:
    """(operation, implementation, reason) as the chosen kinds of parts tell them, where they do.

    Raises:
        UserError: An implementation that the config insists on cannot serve here.
    """
    chosen = []
    for name in ("attention", "feedforward", "connection"):
        kind = kind_class(f"model.{name}", config.model[name].kind)
        if hasattr(kind, "implementations"):
            chosen += kind.implementations(config)
    return chosen


def print_model(
    config: ConfigDict,
    model: LanguageModel,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
) -> None:
    """Prints the model, with what training costs if there is an optimizer, and the mesh."""
    kinds = ", ".join(
        f"{node} {config.model[node].kind}" for node in ("connection", "attention", "feedforward")
    )
    table = Table(title=f"{blocks_in_words(config.model)}: {kinds}")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    optimizer_state = optimizer and abstract_state(model, optimizer, mesh).opt_state
    for row in model_table(model.infos, config, model.vocab_size, optimizer_state, mesh):
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    device = mesh.devices.flat[0]
    axes = ", ".join(f"{name} {length}" for name, length in mesh.shape.items())
    console.print(
        f"{mesh.size} x {device.device_kind} ({device.platform}), mesh {axes}", markup=False
    )


def print_implementations(config: ConfigDict) -> None:
    """Prints the implementation chosen per operation, and why."""
    console = Console(highlight=False, soft_wrap=True)
    for operation, implementation, reason in implementations(config):
        console.print(f"{operation}: {implementation} ({reason})", markup=False)
