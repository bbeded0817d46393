"""From sampled ids to text as it comes. Contract: pure; used by streams and by stop strings.

Invariants
- No piece ends inside a character: ids that decode to an incomplete one wait for the next.
- The text of a tool call is never shown: from the call marker on, everything waits until the message is parsed.
- Leading thinking is shown as such, without its marks.
- What was shown is a prefix of what the message finally shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inspan.gateway.render import END_THINK, THINK
from inspan.gateway.reply import Piece

_INCOMPLETE = "\ufffd"


class Detokeniser:
    """Decodes ids piece by piece; the pieces concatenate to the text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._known = 0  # ids before here are decoded and serve as context
        self._context = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._ids.extend(ids)
        return self._next(final=False)

    def finish(self) -> str:
        """What is left, complete or not."""
        return self._next(final=True)

    def _next(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._context : self._known])
        text = self._decode(self._ids[self._context :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._context, self._known = self._known, len(self._ids)
        return text[len(before) :]


class StopFinder:
    """Finds the first stop string in a growing text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._text = ""
        self.at: int | None = None  # where the text is to be cut
        self.found: str | None = None  # the stop string

    @property
    def text(self) -> str:
        """The text so far, cut at the stop string if there was one."""
        return self._text if self.at is None else self._text[: self.at]

    def push(self, piece: str) -> bool:
        """Take a piece of text in; whether a stop string has been found."""
        if self.at is None and piece:
            start = max(0, len(self._text) - self._longest + 1)
            self._text += piece
            hits = [(at, stop) for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
            if hits:
                self.at, self.found = min(hits)
        return self.at is not None


class Showing:
    """Decides which part of a growing text may be shown already, given how the message will be read back.

    Leading and trailing newlines, anything that might begin a mark or a stop string, and all that follows a call marker
    are held back; without a marker, everything is. `opened` says that the generation prompt has opened the thinking,
    `shown` is what a harness has of the content already.
    """

    def __init__(self, marker: str, stops: Sequence[str] = (), *, opened: bool = False, shown: str = "") -> None:
        self._marker, self._stops = marker, list(stops)
        self._state = "closed" if not marker else "thinking" if opened else "text" if shown else "start"
        self._held = ""
        self.thought = ""  # thinking that was shown
        self.shown = shown

    def push(self, piece: str) -> list[Piece]:
        """Take a piece in; what may be shown now."""
        self._held += piece
        pieces: list[Piece] = []
        if self._state == "start":
            self._begin()
        if self._state == "thinking":
            pieces += self._thinking()
        if self._state == "text":
            pieces += self._text()
        return pieces

    def finish(self, reasoning: str, content: str) -> list[Piece]:
        """What of the parsed message's thinking and content is still to be shown."""
        thought = reasoning[len(self.thought) :] if reasoning.startswith(self.thought) else ""
        text = content[len(self.shown) :] if content.startswith(self.shown) else ""
        self.thought += thought
        self.shown += text
        rest = [Piece("reasoning", thought), Piece("text", text)]
        return [piece for piece in rest if piece.text]

    def _begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._state, self._held = "thinking", begun[len(THINK) :]
        elif not THINK.startswith(begun):
            self._state = "text"

    def _thinking(self) -> list[Piece]:
        text, closed, rest = self._held.partition(END_THINK)
        if closed:
            self._state, self._held = "text", rest
            text = text.rstrip("\n")
        else:
            text, self._held = self._split(text, [END_THINK, *self._stops])
        if not self.thought:
            text = text.lstrip("\n")
        self.thought += text
        return [Piece("reasoning", text)] if text else []

    def _text(self) -> list[Piece]:
        at = self._held.find(self._marker)
        if at >= 0:
            self._state = "closed"
            text = self._held[:at].rstrip("\n")
        else:
            text, self._held = self._split(self._held, [self._marker, *self._stops])
        if not self.shown:
            text = text.lstrip("\n")
        self.shown += text
        return [Piece("text", text)] if text else []

    @staticmethod
    def _split(text: str, guards: Sequence[str]) -> tuple[str, str]:
        """What may be shown, and what is held back: newlines at the end, and the longest end that may begin a guard."""
        most = 0
        for guard in guards:
            for size in range(min(len(guard) - 1, len(text)), most, -1):
                if text.endswith(guard[:size]):
                    most = size
                    break
        keep = len(text[: len(text) - most].rstrip("\n"))
        return text[:keep], text[keep:]
