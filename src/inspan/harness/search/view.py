"""What a search agent sees of its own trajectory. Contract: pruned text is in no message from then on.

The view is a conversation whose tool messages are made of parts: plain text, and chunks, which a prune replaces by a
short marker. Everything else of a message stays as it was sent, so that a view without prunes is an ordinary growing
conversation. Every chunk that was ever shown stays `seen`, also when it is pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspan.harness.search.tokens import PER_MESSAGE, Count
from inspan.retrieval.base import Chunk

Part = str | Chunk


def shown(chunk: Chunk) -> str:
    """A chunk as the model reads it: the id stands behind the text, so that a small model can copy it from there."""
    return f"{chunk.text} [{chunk.id}]"


def marker(chunk: Chunk) -> str:
    """What stands in the place of a chunk that was pruned."""
    return f"pruned [{chunk.id}]"


@dataclass(slots=True)
class Entry:
    """A message: its fields, and the parts that its content is joined of (None: its own content stands)."""

    fields: Mapping[str, Any]
    parts: list[Part] | None = None


@dataclass(slots=True)
class View:
    """The conversation as it will be sent."""

    count: Count
    entries: list[Entry] = field(default_factory=list)
    seen: dict[str, Chunk] = field(default_factory=dict)  # in the order in which they were shown
    pruned: set[str] = field(default_factory=set)

    def say(self, role: str, content: str) -> None:
        """Add a message of plain text."""
        self.entries.append(Entry({"role": role}, [content]))

    def reply(self, message: Mapping[str, Any]) -> None:
        """Add what the model answered, to be sent back unchanged."""
        self.entries.append(Entry(message))

    def result(self, call_id: str, parts: Iterable[Part]) -> None:
        """Add the result of a tool call."""
        parts = list(parts)
        self.entries.append(Entry({"role": "tool", "tool_call_id": call_id}, parts))
        self.seen.update({part.id: part for part in parts if isinstance(part, Chunk)})

    def append(self, text: str) -> None:
        """Add a line to the last message, which must not be the model's."""
        parts = self.entries[-1].parts
        assert parts is not None, "a model's message is sent back as it was"
        parts.append(text)

    def prune(self, ids: Iterable[str]) -> None:
        """Take chunks out of the view."""
        self.pruned.update(ids)

    @property
    def visible(self) -> list[str]:
        """The ids of the chunks in view, in the order in which they were shown."""
        return [id for id in self.seen if id not in self.pruned]

    def messages(self, note: str | None = None) -> list[dict[str, Any]]:
        """The messages to send; `note` is added to the last one without being kept."""
        made = [self._message(entry) for entry in self.entries]
        if note:
            made[-1]["content"] += f"\n{note}"
        return made

    def used(self) -> int:
        """Tokens that the view takes, by the count."""
        return sum(self._tokens(entry) for entry in self.entries)

    def _content(self, parts: Sequence[Part]) -> str:
        return "\n".join(self._text(part) for part in parts)

    def _text(self, part: Part) -> str:
        if isinstance(part, str):
            return part
        return marker(part) if part.id in self.pruned else shown(part)

    def _message(self, entry: Entry) -> dict[str, Any]:
        if entry.parts is None:
            return dict(entry.fields)
        return {**entry.fields, "content": self._content(entry.parts)}

    def _tokens(self, entry: Entry) -> int:
        if entry.parts is not None:
            return PER_MESSAGE + sum(self.count(self._text(part)) for part in entry.parts)
        content, calls = entry.fields.get("content") or "", entry.fields.get("tool_calls") or ()
        texts = [content, *(part for call in calls for part in _call_texts(call))]
        return PER_MESSAGE + sum(self.count(text) for text in texts if text)


def _call_texts(call: Mapping[str, Any]) -> tuple[str, str]:
    return str(call["function"]["name"]), str(call["function"]["arguments"])
