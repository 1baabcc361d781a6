"""Progress of a long preparation: a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import rich.console
import rich.progress

_LINE_SECONDS = 10.0


class Progress:
    """Shows bytes of text done, and a note beside them, on stderr.

    Args:
      title: what is being done.
      total_bytes: all text, or None where it is not known.
      enabled: False shows nothing.
    """

    def __init__(self, title: str, total_bytes: int | None, enabled: bool = True):
        self._title, self._total = title, total_bytes
        self._plain = enabled and not sys.stderr.isatty()
        self._bar = None
        self._begin = self._last = time.monotonic()
        if enabled and not self._plain:
            self._bar = rich.progress.Progress(
                *rich.progress.Progress.get_default_columns(),
                rich.progress.DownloadColumn(),
                rich.progress.TextColumn("{task.fields[note]}"),
                console=rich.console.Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(title, total=total_bytes, note="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done_bytes: int, note: str) -> None:
        """Shows how far it is, counted from the beginning."""
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=done_bytes, note=note)
        elif self._plain and now - self._last >= _LINE_SECONDS:
            self._last = now
            share = f"{done_bytes / self._total:.0%}, " if self._total else ""
            rate = done_bytes / (now - self._begin) / 1e6
            print(f"{self._title}: {share}{note}, {rate:.1f} MB/s", file=sys.stderr, flush=True)
