"""Trains one config in many variants, and compares them.

  python -m nag_jax.sweep --config=configs/optimizers_small.py:connection=nag --out=runs/rates \\
      --grid=optimizer.learning_rate=1e-3,3e-3 --grid=seed=0,1
  python -m nag_jax.sweep --compare --out=runs/rates [--at=steps|tokens|flops|time]

--grid (each value with each), --zip (a=1,2;b=3,4: together) and --list (a=1 b=2;a=3: one by one)
may be given several times and multiply. Each run is a run of nag_jax.train in its own folder of
--out. The same command goes on where it was stopped: what is complete is left alone, what failed is
tried again. Failed runs stay in the table with their reason.
"""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from absl import flags
from etils import epath

from nag_jax import cli
from nag_jax.errors import UserError

_OUT = flags.DEFINE_string("out", None, "folder of the sweep: runs/, logs/ and tables")
_GRID = flags.DEFINE_multi_string("grid", [], "key=value,value,...; several multiply")
_ZIP = flags.DEFINE_multi_string("zip", [], "key=a,b;key=c,d: values that go together")
_LIST = flags.DEFINE_multi_string("list", [], "key=a key=b;key=c: runs one by one")
_PARALLEL = flags.DEFINE_integer("parallel", 1, "runs at a time", lower_bound=1)
_COMPARE = flags.DEFINE_bool("compare", False, "compare the runs of --out, train nothing")
_AT = flags.DEFINE_enum("at", "steps", ["steps", "tokens", "flops", "time"], "what is equal")
_METRIC = flags.DEFINE_string("metric", "validation/bits_per_byte", "what is compared")
_BASELINE = flags.DEFINE_string("baseline", None, "group to pair others with; by itself the best")
flags.mark_flag_as_required("out")

PLAN, TABLE = "sweep.json", "runs"


def main(arguments, flag_values) -> int:
    """Runs or compares."""
    from nag_jax.training.checkpoints import absolute
    from nag_jax.training.workdir import require_possible

    out = absolute(flag_values.out)
    if flag_values.compare:
        return compare(out, flag_values)
    if arguments.config_file is None:
        raise UserError("--config=path.py must be given, or --compare")
    require_possible(out, "--out")
    return train_all(out, arguments, flag_values)


def train_all(out: epath.Path, arguments: cli.Arguments, flag_values: Any) -> int:
    """Checks every variant, then trains those that are not complete; 1 if any failed."""
    from nag_jax.analysis.grids import variants

    plan = _Plan(out, arguments.config_file, arguments.overrides)
    chosen = variants(flag_values.grid, flag_values.zip, flag_values.list)
    steps = {variant.name: plan.check(variant) for variant in chosen}
    plan.save(chosen)
    print(f"{len(chosen)} runs in {out}", flush=True)
    said = threading.Lock()

    def one(number_and_variant):
        number, variant = number_and_variant
        failure = plan.train(variant, steps[variant.name])
        with said:
            told = f"failed: {failure}" if failure else "complete"
            print(f"[{number}/{len(chosen)}] {variant.name}: {told}", flush=True)
        return variant.name, failure

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: runs save and stop
    pool = ThreadPoolExecutor(flag_values.parallel)
    try:
        failures = dict(pool.map(one, enumerate(chosen, start=1)))
    finally:
        plan.stop()
        pool.shutdown(cancel_futures=True)
    write_table(out, chosen, failures)
    failed = [name for name, failure in failures.items() if failure]
    if failed:
        told = f"{len(failed)} of {len(chosen)} runs, such as {failed[0]}: {failures[failed[0]]}"
        print(f"failed: {told}", file=sys.stderr)
    return cli.FAILED if failed else 0


class _Plan:
    """The config that a sweep varies, and where its runs lie."""

    def __init__(self, out: epath.Path, config_file: str, overrides: list[str]):
        self.out, self.config_file, self.overrides = out, config_file, overrides
        self._running: set[subprocess.Popen] = set()
        self._stopped = False

    def lines(self, variant) -> list[str]:
        """All overrides of a run; the varied ones win."""
        return [*self.overrides, *(f"{key}={value}" for key, value in variant.values.items())]

    def check(self, variant) -> int:
        """Validates a run's config and returns its steps.

        Raises:
            UserError: The config is wrong; the sentence begins with the run's name.
        """
        from nag_jax import config as config_lib

        try:
            file = config_lib.load_config_file(self.config_file)
            config = config_lib.resolve(file, self.lines(variant))
            config_lib.validate(config)
        except UserError as error:
            raise UserError(f"run {variant.name}: {error}") from error
        return config.train.steps

    def save(self, chosen) -> None:
        """Writes what the sweep is; a folder holds one config's runs.

        Raises:
            UserError: The folder holds those of another one.
        """
        path = self.out / PLAN
        ours = {"config": self.config_file, "overrides": self.overrides}
        runs = {}
        if path.exists():
            before = json.loads(path.read_text())
            if {key: before[key] for key in ours} != ours:
                raise UserError(
                    f"--out={self.out} holds a sweep of {before['config']} with the overrides "
                    f"{before['overrides']}: choose another folder"
                )
            runs = before["runs"]
        for variant in chosen:
            runs[variant.name] = variant.values
        self.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ours | {"runs": runs}, indent=1))

    def train(self, variant, steps: int) -> str:
        """Trains a run to its end, or finds it there; returns why it failed, or nothing."""
        workdir = run_folder(self.out, variant.name)
        if is_complete(workdir, steps):
            return ""
        logs = self.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "nag_jax.train", f"--config={self.config_file}"),
            *(f"--config.{line}" for line in self.lines(variant)),
            f"--workdir={workdir}",
        ]
        if self._stopped:
            return "not started"
        with (logs / f"{variant.name}.log").open("w") as log:
            run = subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, text=True)
            self._running.add(run)
            _, told = run.communicate()
            self._running.discard(run)
            log.write(told)
        if run.returncode == 0 and is_complete(workdir, steps):
            return ""
        last = (told.strip().splitlines() or ["stopped before its end"])[-1]
        return last.removeprefix("failed: ").removeprefix("error: ")

    def stop(self) -> None:
        """Lets what still trains save and stop, and starts nothing more."""
        self._stopped = True
        for run in list(self._running):
            run.terminate()


def run_folder(out: epath.Path, name: str) -> epath.Path:
    """The workdir of a run."""
    return out / "runs" / name


def is_complete(workdir: epath.Path, steps: int) -> bool:
    """Whether a run's last checkpoint is that of its last step."""
    from nag_jax.training.checkpoints import CheckpointReader

    return steps in CheckpointReader(workdir / "checkpoints", checksums=False).steps()


def write_table(out: epath.Path, chosen, failures: dict[str, str]) -> None:
    """Writes runs.csv and runs.md: every run with its values, its last results and its failure."""
    from nag_jax.tables import csv_table, markdown_table
    from nag_jax.training.metrics import FILE_NAME, read_metrics

    keys = list(dict.fromkeys(key for variant in chosen for key in variant.values))
    measured = ("validation/bits_per_byte", "validation/loss")
    rows = []
    for variant in chosen:
        workdir = run_folder(out, variant.name)
        lines = read_metrics(workdir) if (workdir / FILE_NAME).exists() else []
        last = {name: line[name] for line in lines for name in measured if name in line}
        rows.append(
            {key: variant.values.get(key, "") for key in keys}
            | {"step": max((line["step"] for line in lines), default=0)}
            | {name: f"{last[name]:.4f}" if name in last else "" for name in measured}
            | {"failure": failures[variant.name]}
        )
    (out / f"{TABLE}.csv").write_text(csv_table(rows))
    (out / f"{TABLE}.md").write_text(markdown_table(list(rows[0]), [r.values() for r in rows]))
    print(f"Wrote {out / TABLE}.md and .csv")


def compare(out: epath.Path, flag_values: Any) -> int:
    """Writes comparison.md, .csv, .png and .pdf of a sweep's runs, and prints the table."""
    from nag_jax.analysis import comparison as comparison_lib
    from nag_jax.analysis import plots
    from nag_jax.training.metrics import FILE_NAME

    path = out / PLAN
    if not path.exists():
        raise UserError(f"--out={out} holds no sweep: there is no {PLAN}")
    names = json.loads(path.read_text())["runs"]
    present = [name for name in names if (run_folder(out, name) / FILE_NAME).exists()]
    runs = []
    for name in present:
        try:
            runs.append(comparison_lib.read_run(run_folder(out, name), flag_values.metric))
        except UserError as error:
            print(f"{name} is left out: {error}")
    if absent := sorted(set(names) - set(present)):
        print(f"{len(absent)} runs have no metrics and are left out, such as {absent[0]}")
    if not runs:
        raise UserError(f"--out={out} holds no run that can be compared")
    result = comparison_lib.compare(runs, flag_values.metric, flag_values.at, flag_values.baseline)
    print(result.markdown())
    figure = plots.comparison_figure(result)
    for suffix, content in (
        ("md", result.markdown().encode()),
        ("csv", result.csv().encode()),
        ("png", plots.png(figure)),
        ("pdf", plots.pdf(figure)),
    ):
        (out / f"comparison.{suffix}").write_bytes(content)
    print(f"Wrote {out}/comparison.md, .csv, .png and .pdf")
    return 0


if __name__ == "__main__":
    cli.run(main, config="own")
