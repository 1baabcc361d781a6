"""Trains a small norm-agnostic model and its pre-norm twin on real text, and reports on both.

  python -m nag_jax.demo            # or: make demo

The text is the source of the running Python's own standard library. Both models see the same rows
in the same order, a fixed number of tokens; beside them stand a trigram model of bytes and `xz -9`.
What it prints at the end is what was measured, whichever model wins.
"""

import os
import sys
import time

from absl import flags
from etils import epath

from nag_jax import cli
from nag_jax.errors import UserError

_OUT = flags.DEFINE_string("out", "report", "folder of the report")
_RUNS = flags.DEFINE_string(
    "runs", "runs/demo", "folder of the two runs; they go on if interrupted"
)
_SMOKE = flags.DEFINE_bool("smoke", False, "shrink everything to run in seconds")

CONFIG = epath.Path(__file__).parents[1] / "configs" / "demo.py"
MODELS = {"NAG": "nag", "pre-norm": "prenorm"}
PROMPT = "import os\nimport re\n\ndef read_lines(path):\n    "
SAMPLE_TOKENS = 120
# Told with the result: a comparison is worth no more than how its settings came about.
SETTINGS = (
    "Both models have CCGQA, a mixture of eight experts and Muon. Each one's embedding rate is the "
    "better of two (8 and 15) by one run each of twice the steps on these same validation "
    "documents: NAG 1.306 and 1.285 bits per byte, pre-norm 1.304 and 1.327. NAG's starting scale, "
    "its scale's rate and its warm-up are its own too, set and not tried."
)


def make_folder(flag: str, folder: epath.Path) -> None:
    """Makes a folder before minutes of work go into what it is for.

    Raises:
        UserError: It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{flag}={folder}: no such folder can be made: {reason}") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{flag}={folder} may not be written")


def main(config, flag_values) -> int:
    """Trains both, measures the yardsticks, samples, writes the report."""
    del config
    from rich.console import Console
    from rich.table import Table

    from nag_jax import config as config_lib
    from nag_jax.analysis import baselines
    from nag_jax.analysis.flops import parameters_by_role
    from nag_jax.analysis.report import RunSummary, Sample, verdict, write_report
    from nag_jax.data import store
    from nag_jax.runs import load_run
    from nag_jax.training.checkpoints import SaveFailed, absolute
    from nag_jax.training.errors import RunFailed
    from nag_jax.training.loop import train
    from nag_jax.training.metrics import read_metrics

    began = time.perf_counter()
    console = Console(highlight=False, soft_wrap=True)
    root, out = absolute(flag_values.runs), absolute(flag_values.out)
    make_folder("--out", out)
    summaries, runs = [], {}
    for name, connection in MODELS.items():
        console.rule(f"{name}: training")
        argument = f"connection={connection}" + (",smoke" if flag_values.smoke else "")
        config = config_lib.resolve(config_lib.load_config_file(f"{CONFIG}:{argument}"))
        config_lib.validate(config)
        started = time.perf_counter()
        try:
            outcome = train(config, root / connection)
        except (SaveFailed, RunFailed) as error:
            print(f"failed: {error}", file=sys.stderr)
            return cli.FAILED
        if not outcome.finished:
            print("The same command goes on from there.")
            return cli.INTERRUPTED
        # A run that was complete before has no time of its own here.
        seconds = time.perf_counter() - started if outcome.evaluation else None
        run = runs[name] = load_run(root / connection)
        evaluation = outcome.evaluation or run.evaluate_validation()
        summaries.append(
            RunSummary(
                name=name,
                metrics=read_metrics(root / connection),
                tokens_per_step=config.train.batch_size * config.data.row_length,
                bits_per_byte=evaluation.bits_per_byte,
                taps=evaluation.taps,
                sublayers=run.model.sublayer_names,
                dead_gate_share=evaluation.dead_gate_share,
                parameters=sum(parameters_by_role(run.model.infos, run.model.vocab_size).values()),
                seconds=seconds,
                config=config.to_dict(),
            )
        )

    console.rule("yardsticks")
    train_texts, validation = store.split_texts(config.data)
    validation_texts = [text for _, text in validation]
    xz = baselines.xz_bits_per_byte(train_texts, validation_texts)
    yardsticks = {
        "smoothed trigram of bytes": baselines.trigram_bits_per_byte(train_texts, validation_texts),
        f"xz -9 after {xz.prefix_bytes / 1e6:.1f} MB of training text": xz.bits_per_byte,
    }

    best = min(summaries, key=lambda summary: summary.bits_per_byte)
    console.rule(f"a sample of {best.name}, the better model here")
    console.print(PROMPT, end="", markup=False)
    sample = runs[best.name].generate(
        PROMPT,
        max_tokens=SAMPLE_TOKENS,
        temperature=0.8,
        top_p=0.95,
        on_text=lambda text: console.print(text, end="", markup=False),
    )
    console.print()

    prepared = store.prepare(config.data, progress=False)
    path = write_report(
        out,
        summaries,
        yardsticks,
        Sample(best.name, PROMPT, sample.text),
        {
            "corpus": f"{config.data.source.kind}, {prepared.summary['documents']:,} documents, "
            f"{prepared.summary['bytes']:,} bytes",
            "corpus fingerprint": prepared.corpus_fingerprint,
            "validation": f"{prepared.summary['validation_documents']:,} whole documents, "
            f"{prepared.summary['validation_bytes']:,} bytes, never trained on",
            "how the settings were chosen": SETTINGS,
        },
    )
    console.rule("result")
    table = Table(title=f"validation, corpus {prepared.corpus_fingerprint}")
    table.add_column("")
    table.add_column("bits per byte", justify="right")
    table.add_column("parameters", justify="right")
    table.add_column("training tokens", justify="right")
    for summary in summaries:
        table.add_row(
            summary.name,
            f"{summary.bits_per_byte:.4f}",
            f"{summary.parameters:,}",
            f"{summary.tokens:,}",
        )
    for name, bits in yardsticks.items():
        table.add_row(name, f"{bits:.4f}", "", "")
    console.print(table)
    console.print(verdict(summaries, yardsticks), markup=False)
    console.print(SETTINGS, markup=False)
    console.print(f"Report: {path}   ({time.perf_counter() - began:.0f} s in all)", markup=False)
    return 0


if __name__ == "__main__":
    cli.run(main, config="refused")
