"""From sampled ids to text as it comes. Contract: pure; used by streams and by stop strings.

Invariants
- No piece ends inside a character: ids that decode to an incomplete one wait for the next.
- The text of a tool call is never shown: from the call marker on, everything waits until the message is parsed.
- What was shown is a prefix of what the message finally shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inspan.gateway.render import END_THINK, THINK

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

    @property
    def text(self) -> str:
        """The text so far, cut at the stop string if there was one."""
        return self._text if self.at is None else self._text[: self.at]

    def push(self, piece: str) -> bool:
        """Take a piece of text in; whether a stop string has been found."""
        if self.at is None and piece:
            start = max(0, len(self._text) - self._longest + 1)
            self._text += piece
            hits = [at for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
            if hits:
                self.at = min(hits)
        return self.at is not None


class Showing:
    """Decides which part of a growing text may be shown already, given how the message will be read back.

    Leading and trailing newlines, anything that might begin a tool call or a stop string, and all that follows a call
    marker are held back; without a marker, everything is. Thinking that leads the text (or goes on, when the
    generation prompt `opened` it) is not content. `shown` is what a harness has of the message already.
    """

    def __init__(self, marker: str, stops: Sequence[str] = (), *, opened: bool = False, shown: str = "") -> None:
        self._marker = marker
        self._guards = [marker, *stops]
        self._held = ""
        self._closed = not marker
        self._thinking: bool | None = True if opened else False if shown else None  # None: it cannot be told yet
        self.shown = shown

    def push(self, piece: str) -> str:
        """Take a piece in; what may be shown now."""
        if self._closed:
            return ""
        text = self._held + piece
        if self._thinking is not False:
            self._held, text = self._past_thinking(text)
            if not text:
                return ""
        at = text.find(self._marker)
        if at >= 0:
            self._closed = True
            text, held = text[:at].rstrip("\n"), ""
        else:
            keep = len(text) - self._unsure(text)
            keep = len(text[:keep].rstrip("\n"))
            text, held = text[:keep], text[keep:]
        if not self.shown:
            text = text.lstrip("\n")
        self._held = held
        self.shown += text
        return text

    def finish(self, content: str) -> str:
        """What of the parsed message's content is still to be shown."""
        rest = content[len(self.shown) :] if content.startswith(self.shown) else ""
        self.shown += rest
        return rest

    def _past_thinking(self, text: str) -> tuple[str, str]:
        """What is to be held, and what follows the thinking."""
        lead = text.lstrip()
        if self._thinking is None:
            if THINK.startswith(lead):
                return text, ""
            self._thinking = lead.startswith(THINK)
        if self._thinking:
            _, closed, rest = text.partition(END_THINK)
            self._thinking = not closed
            return ("", rest) if closed else (text[1 - len(END_THINK) :], "")
        return "", text

    def _unsure(self, text: str) -> int:
        """The length of the longest end of the text that may begin a guard."""
        most = 0
        for guard in self._guards:
            for size in range(min(len(guard) - 1, len(text)), most, -1):
                if text.endswith(guard[:size]):
                    most = size
                    break
        return most
