"""Reports a trained model's bits per byte on a corpus, on files or on single documents.

  python -m nag_jax.evaluate --checkpoint=runs/nag                      # the run's validation set
  python -m nag_jax.evaluate --checkpoint=runs/nag --text='docs/*.md' --by=document
  python -m nag_jax.evaluate --checkpoint=runs/nag --jsonl=a.jsonl.gz --field=body --json=out.json
  python -m nag_jax.evaluate --checkpoint=runs/nag --skip_rate=0,.1,.2,.4 --skip=ffn --out=mod.md

The last finds thresholds at which tokens skip sub-layers, for each rate, and says what the model
scores with them and what they save; --save keeps them as a run (docs/skipping.md).

The divisor is the UTF-8 bytes of the original text. Documents are packed into rows of the length
used in training; a document longer than a row goes on in the next without its earlier context.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Container, Iterator

from absl import flags
from etils import epath
from ml_collections import ConfigDict

from nag_jax import cli
from nag_jax.data.files import absolute
from nag_jax.data.packing import utf8_length
from nag_jax.errors import UserError

# Sub-layers by the flag's short names.
SKIP = {"ffn": "feedforward", "attention": "attention", "both": "both"}

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "a run's folder or one step's folder")
_STEP = flags.DEFINE_integer("step", None, "which step; the newest intact one by default")
_TEXT = flags.DEFINE_list("text", [], "text files or patterns, one document a file")
_JSONL = flags.DEFINE_list("jsonl", [], "JSON Lines files (.jsonl, .gz, .zst) or patterns")
_PARQUET = flags.DEFINE_list("parquet", [], "Parquet files or patterns")
_FIELD = flags.DEFINE_string("field", "text", "field that holds the text in JSON Lines or Parquet")
_BY = flags.DEFINE_enum(
    "by",
    None,
    ["corpus", "file", "document"],
    "what each line reports; file by default, corpus for the run's own validation set",
)
_BATCH = flags.DEFINE_integer("batch_size", 16, "rows per forward pass; no result depends on it")
_JSON = flags.DEFINE_string("json", "", "also write the results to this file")
_LOOPS = flags.DEFINE_integer("loops", None, "runs of the model's loop; as in training by default")
_USER_KINDS = flags.DEFINE_bool(
    "allow_user_kinds", False, "import classes that the checkpoint's config names"
)
_SKIP_RATE = flags.DEFINE_list(
    "skip_rate", None, "shares of tokens that skip sub-layers, such as 0,.1,.2: a table by rate"
)
_SKIP = flags.DEFINE_enum(
    "skip", None, list(SKIP), "sub-layers that tokens skip; those of the run, or both, by default"
)
_CALIBRATION = flags.DEFINE_string(
    "calibration",
    "train:1M",
    "what thresholds are found on: so many tokens of the run's train or validation, or text files",
)
_OUT = flags.DEFINE_string("out", "", "also write the table of rates to this Markdown file")
_SAVE = flags.DEFINE_string("save", "", "also save the thresholds of the one rate as a run here")
flags.mark_flag_as_required("checkpoint")


class Texts:
    """Documents of the files named on the command line, hashed as they are read.

    Attributes:
        whole_files: Names read so far of documents that are a file each.
    """

    def __init__(self, flag_values: flags.FlagValues):
        from nag_jax.kinds import kind_class

        self._sources = []
        for kind in ("text", "jsonl", "parquet"):
            paths = tuple(flag_values[kind].value)
            if flag_values[kind].present and not any(paths):
                raise UserError(f"--{kind} is empty: name at least one file or pattern")
            if paths:
                node = ConfigDict({"paths": paths, "field": flag_values.field})
                with _named_flags(kind):
                    self._sources.append((kind, kind_class("data.source", kind)(node)))
        self._digest = hashlib.blake2b(digest_size=12)
        self.whole_files: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._sources)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for kind, source in self._sources:
            with _named_flags(kind):
                for document in source.documents():
                    utf8_length(document.text, document.where)
                    data = f"{document.name}\0{document.text}\0"
                    self._digest.update(data.encode(errors="surrogateescape"))
                    if kind == "text":
                        self.whole_files.add(document.name)
                    yield document.name, document.text

    @property
    def fingerprint(self) -> str:
        """Hash of the names and texts read so far."""
        return self._digest.hexdigest()


@contextlib.contextmanager
def _named_flags(kind: str) -> Iterator[None]:
    """Errors of a source speak of config keys; here these are flags."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("data.source.paths", f"--{kind}")
        raise UserError(text.replace("data.source.field", "--field")) from error


def require_writable(flag: str, path: epath.Path) -> None:
    """Refuses a file that cannot be written, before any work is done for it.

    Raises:
        UserError: It is a folder, lies in none, or may not be written.
    """
    if "://" in str(path):
        path.exists()  # needs the package that writes there
        return
    if path.is_dir():
        raise UserError(f"{flag}={path}: it is a folder, not a file")
    if not path.parent.is_dir():
        raise UserError(f"{flag}={path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{flag}={path} may not be written")


def group_of(name: str, by: str, whole_files: Container[str]) -> str:
    """What a document is reported under: itself, its file, or everything together."""
    if by == "corpus":
        return "all"
    # Documents of files that hold several are named "file:line".
    return name if by == "document" or name in whole_files else re.sub(r":\d+$", "", name)


def asked_rates(flag_values: flags.FlagValues) -> list[float]:
    """The rates of --skip_rate, none without it; refuses flags that do not go together.

    Raises:
        UserError: One sentence naming the flag.
    """
    if flag_values.skip_rate is None:
        for name in ("skip", "calibration", "out", "save"):
            if flag_values[name].present:
                raise UserError(f"--{name} goes with --skip_rate, which is not given")
        return []

    from nag_jax.evals import skipping

    if flag_values.by is not None:
        raise UserError("--by does not go with --skip_rate, whose table has a line for each rate")
    rates = []
    for text in flag_values.skip_rate:
        try:
            rates.append(float(text))
        except ValueError:
            raise UserError(f"--skip_rate: {text!r} is no number; say such as 0,.1,.2") from None
        skipping.require_rate(rates[-1])
    if not rates:
        raise UserError("--skip_rate is empty: name at least one rate, such as 0,.1,.2")
    skipping.parse_split(flag_values.calibration)
    if flag_values.save and sum(rate > 0 for rate in rates) != 1:
        raise UserError("--save keeps the thresholds of one rate: give one --skip_rate above 0")
    if flag_values.save and flag_values.loops is not None:
        raise UserError("--save does not go with --loops: a run is saved with its own loop")
    return rates


def writable(flag_values: flags.FlagValues, name: str) -> epath.Path | None:
    """The file that a flag names, where it names one that can be written."""
    path = absolute(flag_values[name].value) if flag_values[name].value else None
    if path is not None:
        require_writable(f"--{name}", path)
    return path


def write(flag: str, path: epath.Path | None, text: str) -> None:
    """Writes a file that a flag names, if it does."""
    if path is None:
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{flag}={path} cannot be written: {error.strerror or error}") from error


def main(config, flag_values) -> int:
    """Loads the run, scores the documents, prints the table."""
    del config
    import numpy as np
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from nag_jax.runs import load_run

    if flag_values.batch_size < 1:
        raise UserError(f"--batch_size={flag_values.batch_size}: it must be at least 1")
    rates = asked_rates(flag_values)
    out = writable(flag_values, "json")
    if rates:
        return skip(flag_values, rates, out)
    texts = Texts(flag_values)
    run = load_run(
        flag_values.checkpoint,
        flag_values.step,
        loops=flag_values.loops,
        allow_user_kinds=flag_values.allow_user_kinds,
    )
    if texts:
        result = run.evaluate(texts, flag_values.batch_size)
        corpus, by = texts.fingerprint, flag_values.by or "file"
        whole_files = texts.whole_files
    else:
        result = run.evaluate_validation(flag_values.batch_size)
        corpus = run.corpus_fingerprint
        by = flag_values.by or "corpus"
        one_a_file = run.config.data.source.kind in ("python_stdlib", "text")
        whole_files = set(result.document_names) if one_a_file else set()

    groups: dict[str, list[int]] = {}
    for number, name in enumerate(result.document_names):
        groups.setdefault(group_of(name, by, whole_files), []).append(number)
    title = f"step {run.step} of {flag_values.checkpoint}, corpus {corpus}"
    if flag_values.loops is not None:
        title += f", loops {run.model.loops}"
    table = Table(title=escape(title))
    table.add_column(by, overflow="fold")
    for column in ("documents", "bytes", "bits per byte"):
        table.add_column(column, justify="right")
    lines = []
    for name, numbers in groups.items():
        size = int(result.document_bytes[numbers].sum())
        bits = float(result.document_nats[numbers].sum() / size / np.log(2))
        lines.append(
            {"name": name, "documents": len(numbers), "bytes": size, "bits_per_byte": bits}
        )
        table.add_row(escape(name), f"{len(numbers):,}", f"{size:,}", f"{bits:.4f}")
    if len(groups) > 1:
        total = int(result.document_bytes.sum())
        table.add_section()
        table.add_row(
            "all", f"{len(result.document_names):,}", f"{total:,}", f"{result.bits_per_byte:.4f}"
        )
    Console(highlight=False).print(table)
    print(
        f"{result.tokens:,} tokens: {result.loss:.4f} nats per token, "
        f"accuracy {result.accuracy:.2%}"
    )
    if result.dead_gate_share is not None:
        print(f"sub-layers with a dead gate: {result.dead_gate_share:.0%}")
    if out is not None:
        content = {
            "checkpoint": flag_values.checkpoint,
            "step": run.step,
            "loops": run.model.loops,
            "corpus_fingerprint": corpus,
            "bits_per_byte": result.bits_per_byte,
            "loss": result.loss,
            "accuracy": result.accuracy,
            "tokens": result.tokens,
            "dead_gate_share": result.dead_gate_share,
            "taps": result.taps,
            by: lines,
        }
        write("--json", out, json.dumps(content, indent=1) + "\n")
    return 0


def skip(flag_values: flags.FlagValues, rates: list[float], json_file: epath.Path | None) -> int:
    """Loads the run, finds thresholds for each rate, prints and writes the table, saves."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from nag_jax.evals import skipping
    from nag_jax.evals.skipping_table import skipping_table
    from nag_jax.runs import load_run, require_no_run
    from nag_jax.training.checkpoints import SaveFailed

    markdown_file = writable(flag_values, "out")
    folder = absolute(flag_values.save) if flag_values.save else None
    if folder is not None:
        require_no_run(folder, "--save")
    texts = Texts(flag_values)
    run = load_run(
        flag_values.checkpoint,
        flag_values.step,
        loops=flag_values.loops,
        allow_user_kinds=flag_values.allow_user_kinds,
    )
    sublayers = SKIP.get(flag_values.skip) or skipping.own_sublayers(run.config)
    for rate in rates:
        skipping.skipping_config(run.config, rate, sublayers)
    rows = run.pack(texts) if texts else run.validation_rows()
    corpus = texts.fingerprint if texts else run.corpus_fingerprint
    where = "the texts named" if texts else "the run's validation set"
    table = skipping_table(
        run,
        rates,
        sublayers,
        flag_values.calibration,
        rows,
        flag_values.batch_size,
        tell=lambda text: print(text, flush=True),
    )
    title = f"step {run.step} of {flag_values.checkpoint} on {where}, corpus {corpus}"
    if flag_values.loops is not None:
        title += f", loops {run.model.loops}"
    shown = Table(title=escape(title))
    for number, name in enumerate(table.header()):
        shown.add_column(name, justify="right" if number else "left")
    for cells in table.cells():
        shown.add_row(*cells)
    Console(highlight=False).print(shown)
    for note in table.notes():
        print(note)
    content = {
        "checkpoint": flag_values.checkpoint,
        "step": run.step,
        "loops": run.model.loops,
        "corpus_fingerprint": corpus,
        **table.to_json(),
    }
    write("--json", json_file, json.dumps(content, indent=1) + "\n")
    write("--out", markdown_file, table.markdown(title[0].upper() + title[1:]))
    if folder is not None:
        try:
            table.last.save(folder)
        except SaveFailed as error:
            print(f"failed: {error}", file=sys.stderr)
            return cli.FAILED
        print(f"Saved as a run: {folder}")
    return 0


if __name__ == "__main__":
    cli.run(main, config="refused")
