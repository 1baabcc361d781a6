"""Reports a trained model's bits per byte on a corpus, on files or on single documents.

  python -m nag_jax.evaluate --checkpoint=runs/nag                      # the run's validation set
  python -m nag_jax.evaluate --checkpoint=runs/nag --text='docs/*.md' --by=document
  python -m nag_jax.evaluate --checkpoint=runs/nag --jsonl=a.jsonl.gz --field=body --json=out.json

The divisor is the UTF-8 bytes of the original text. Documents are packed into rows of the length
used in training; a document longer than a row goes on in the next without its earlier context.
"""

import hashlib
import json
import re
from collections.abc import Iterator

from absl import flags
from ml_collections import ConfigDict

from nag_jax import cli
from nag_jax.errors import UserError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "a run's folder or one step's folder")
_STEP = flags.DEFINE_integer("step", None, "which step; the newest intact one by default")
_TEXT = flags.DEFINE_list("text", [], "text files or patterns, one document a file")
_JSONL = flags.DEFINE_list("jsonl", [], "JSON Lines files (.jsonl, .gz, .zst) or patterns")
_PARQUET = flags.DEFINE_list("parquet", [], "Parquet files or patterns")
_FIELD = flags.DEFINE_string("field", "text", "field that holds the text in JSON Lines or Parquet")
_BY = flags.DEFINE_enum("by", "file", ["corpus", "file", "document"], "what each line reports")
_BATCH = flags.DEFINE_integer("batch_size", 16, "rows per forward pass; no result depends on it")
_JSON = flags.DEFINE_string("json", "", "also write the results to this file")
_USER_KINDS = flags.DEFINE_bool(
    "allow_user_kinds", False, "import classes that the checkpoint's config names"
)
flags.mark_flag_as_required("checkpoint")


class Texts:
    """Documents of the files named on the command line, hashed as they are read."""

    def __init__(self, flag_values: flags.FlagValues):
        from nag_jax.kinds import kind_class

        self._sources = []
        for kind in ("text", "jsonl", "parquet"):
            paths = tuple(flag_values[kind].value)
            if paths:
                node = ConfigDict({"paths": paths, "field": flag_values.field})
                self._sources.append(kind_class("data.source", kind)(node))
        self._digest = hashlib.blake2b(digest_size=12)

    def __bool__(self) -> bool:
        return bool(self._sources)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for source in self._sources:
            for document in source.documents():
                data = f"{document.name}\0{document.text}\0"
                self._digest.update(data.encode(errors="surrogateescape"))
                yield document.name, document.text

    @property
    def fingerprint(self) -> str:
        """Hash of the names and texts read so far."""
        return self._digest.hexdigest()


def group_of(name: str, by: str) -> str:
    """What a document is reported under: itself, its file, or everything together."""
    if by == "document":
        return name
    # Documents of files that hold several are named "file:line".
    return re.sub(r":\d+$", "", name) if by == "file" else "all"


def main(config, flag_values) -> int:
    """Loads the run, scores the documents, prints the table."""
    del config
    import numpy as np
    from etils import epath
    from rich.console import Console
    from rich.table import Table

    from nag_jax.runs import load_run

    if flag_values.batch_size < 1:
        raise UserError(f"--batch_size={flag_values.batch_size}: it must be at least 1")
    texts = Texts(flag_values)
    run = load_run(
        flag_values.checkpoint, flag_values.step, allow_user_kinds=flag_values.allow_user_kinds
    )
    if texts:
        result = run.evaluate(texts, flag_values.batch_size)
        corpus, by = texts.fingerprint, flag_values.by
    else:
        result = run.evaluate_validation(flag_values.batch_size)
        corpus = f"{run.config.data.source.kind}, {run.fingerprint}"
        by = "corpus" if flag_values.by == "file" else flag_values.by

    groups: dict[str, list[int]] = {}
    for number, name in enumerate(result.document_names):
        groups.setdefault(group_of(name, by), []).append(number)
    table = Table(title=f"step {run.step} of {flag_values.checkpoint}, corpus {corpus}")
    table.add_column(by)
    for column in ("documents", "bytes", "bits per byte"):
        table.add_column(column, justify="right")
    lines = []
    for name, numbers in groups.items():
        size = int(result.document_bytes[numbers].sum())
        bits = float(result.document_nats[numbers].sum() / size / np.log(2))
        lines.append(
            {"name": name, "documents": len(numbers), "bytes": size, "bits_per_byte": bits}
        )
        table.add_row(name, f"{len(numbers):,}", f"{size:,}", f"{bits:.4f}")
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
    if flag_values.json:
        content = {
            "checkpoint": flag_values.checkpoint,
            "step": run.step,
            "corpus_fingerprint": corpus,
            "bits_per_byte": result.bits_per_byte,
            "loss": result.loss,
            "accuracy": result.accuracy,
            "tokens": result.tokens,
            "dead_gate_share": result.dead_gate_share,
            "taps": result.taps,
            by: lines,
        }
        epath.Path(flag_values.json).expanduser().write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    cli.run(main, takes_config=False)
