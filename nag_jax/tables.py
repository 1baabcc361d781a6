"""Tables of results as text: Markdown for people, CSV for programs."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]], rule: str = "---") -> str:
    """Returns a Markdown table; `rule` says how cells stand ("---:" is to the right)."""
    lines = [header, [rule] * len(header), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows, at least one and all with the same keys, as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
