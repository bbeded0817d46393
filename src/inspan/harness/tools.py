"""The library's tools: `search` finds page references, `read` opens a page. Contract: an error is a text, not a raise.

Every execution is recorded as a `ToolEvent` with a *declared* latency, so that time along the critical path can be
told without a clock. Tools can be made to fail at a set rate; which executions fail depends on the seed alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspan.retrieval.bm25 import Bm25Index
from inspan.retrieval.corpus import Document
from inspan.trace.records import ToolEvent

FAULTS = ("timeout", "server error")


def schema(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    """An OpenAI function schema whose properties are all required strings."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SEARCH = schema("search", "Find pages in the library; returns page references.", query="what to look for")
READ = schema("read", "Read one page of the library.", page="a page reference, exactly as search gave it")


@dataclass(slots=True)
class Faults:
    """Which executions of a rollout's tools fail: a share `rate` of them, the same ones for the same seed."""

    rate: float = 0.0
    seed: int = 0
    _counts: Counter[str] = field(default_factory=Counter[str])

    def draw(self, name: str, arguments: Mapping[str, Any], session: str = "") -> str | None:
        """The error of an execution that fails, else None."""
        # The n-th execution of a request in a session fails or not, whatever runs beside it; n sets retries apart.
        if self.rate <= 0:
            return None
        request = f"{self.seed} {session} {name} {sorted(arguments.items())}"
        self._counts[request] += 1
        key = f"{request} {self._counts[request]}"
        draw = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
        if draw >= self.rate:
            return None
        return f"error: {FAULTS[int(draw * 2**20) % len(FAULTS)]}"


@dataclass(slots=True)
class Library:
    """Documents with an index: shared, read-only, by all rollouts."""

    documents: Mapping[str, Document]
    index: Bm25Index

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Library:
        """Index documents; ids must be unique."""
        return cls({d.id: d for d in documents}, Bm25Index(documents))


@dataclass(slots=True)
class LibraryTools:
    """A rollout's view of a library. Implements `Toolbox`."""

    library: Library
    results: int = 3
    snippet_chars: int = 0  # of the page shown beside a reference; 0: the reference alone
    page_chars: int = 4000
    faults: Faults = field(default_factory=Faults)
    latency_s: Mapping[str, float] = field(default_factory=lambda: {"search": 0.3, "read": 0.2})
    on_event: Callable[[ToolEvent], None] | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of `search` and `read`."""
        return [SEARCH, READ]

    async def call(self, name: str, arguments: Mapping[str, Any], *, call_id: str, session: str = "") -> str:
        """Run a tool; what goes wrong comes back as text that begins with "error:"."""
        text = self.faults.draw(name, arguments, session) or self.answer(name, arguments)
        ok = not text.startswith("error:")
        if self.on_event:
            event = ToolEvent(session, call_id, name, ok, self.latency_s.get(name, 0.0), "" if ok else text)
            self.on_event(event)
        return text

    def answer(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool says when it does not fail."""
        if name == "search":
            return self._search(arguments.get("query"))
        if name == "read":
            return self._read(arguments.get("page"))
        return f"error: no tool {name}"

    def _search(self, query: Any) -> str:
        if not isinstance(query, str) or not query.strip():
            return "error: query must be a text"
        found = self.library.index.search(query, self.results)
        return "\n".join(self._line(document) for document, _ in found) or "nothing found"

    def _line(self, document: Document) -> str:
        if not self.snippet_chars:
            return document.id
        return f"{document.id}: {' '.join(document.text[: self.snippet_chars].split())}"

    def _read(self, page: Any) -> str:
        document = self.library.documents.get(page.strip()) if isinstance(page, str) else None
        return document.text[: self.page_chars] if document else "error: no such page"
