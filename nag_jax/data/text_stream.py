"""Text from token ids that come one at a time, without ever splitting a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# A character's first bytes, still without the last, are at most three tokens; decoders show them
# as one replacement character, or as one for each byte.
_MOST_UNFINISHED = 3
_CONTEXT = 4
_WINDOW = 32


class TextStream:
    """Decodes incrementally: what `push` and `flush` return, joined, is the text of all ids.

    Only a short window of ids is decoded at each step. It begins with ids already shown, since
    some tokenizers drop a space at the very start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """Adds an id; returns the characters that are complete now, often none."""
        self._ids.append(int(token_id))
        text = self._decode(self._ids)
        held = min(len(text) - len(text.rstrip(_UNFINISHED)), _MOST_UNFINISHED)
        end = max(self._shown, len(text) - held)
        new, self._shown = text[self._shown : end], end
        if not held and len(self._ids) >= _WINDOW:
            self._ids = self._ids[-_CONTEXT:]
            self._shown = len(self._decode(self._ids))
        return new

    def flush(self) -> str:
        """Returns what is held back: the replacement character for bytes that never completed."""
        rest = self._decode(self._ids)[self._shown :]
        self._ids, self._shown = [], 0
        return rest
