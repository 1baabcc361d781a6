"""Runs the contract tests on the parts that a config chooses, and names what fails.

  python -m nag_jax.check --config=configs/nag_small.py:smoke \\
      --config.model.attention.kind=my_package.parts:MyAttention

Causality, document isolation, cached decode, mesh and single device, declared parameters, finite
gradients and `describe`, each on a few rows of up to 64 tokens of the configured model; no data is
read. Exit code 1 if one does not hold.
"""

import os
import time

from absl import flags

from nag_jax import cli

_MAX_PARAMETERS = flags.DEFINE_integer(
    "max_parameters", 100_000_000, "refuse a model of more, rather than fill the memory with it"
)

WORDS = {True: "PASS", False: "FAIL", None: "SKIP"}
STYLES = {True: "green", False: "bold red", None: "yellow"}


def main(config, flag_values) -> int:
    """Checks each contract, prints the table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from nag_jax import contracts
    from nag_jax.models.stages import blocks_in_words
    from nag_jax.training.header import implementations

    implementations(config)  # raises where one that the config insists on cannot serve
    model = config.model
    kinds = ", ".join(f"{node} {model[node].kind}" for node in contracts.PARTS)
    table = Table(
        title=escape(f"{blocks_in_words(model)}: {kinds}"),
        caption=escape(
            f"{model.compute_dtype}: where one program runs on other values "
            f"{contracts.allowed(model, contracts.SAME_PROGRAM):g} of the largest may differ, "
            f"between programs {contracts.allowed(model, contracts.OTHER_PROGRAM):g}, in gradients "
            f"{contracts.allowed(model, contracts.GRADIENTS):g}"
        ),
    )
    for column in ("contract", "", "what was measured"):
        table.add_column(column, overflow="fold")
    failed, began = 0, time.perf_counter()
    for result in contracts.check_config(config, flag_values.max_parameters):
        now = time.perf_counter()
        print(f"{result.name}: {WORDS[result.holds]} ({now - began:.1f} s)", flush=True)
        began = now
        failed += result.holds is False
        word = f"[{STYLES[result.holds]}]{WORDS[result.holds]}[/]"
        table.add_row(escape(result.name), word, escape(result.text))
    Console(highlight=False).print(table)
    return cli.FAILED if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # how fast a layout is matters elsewhere
    import jax

    # Before anything asks for a device; accelerators are left as they are.
    jax.config.update("jax_num_cpu_devices", 4)
    if jax.default_backend() == "cpu":  # compiling is most of the work there
        jax.config.update("jax_disable_most_optimizations", True)
    cli.run(main)
