"""The tools of a corpus: search_corpus, grep_corpus, read_document. Contract: an error is a text, not a raise.

`find` gives chunks, cut to a number of tokens and without those seen before: what the search agent works with. `call`
gives the same as text, so that any other harness can use them as plain tools. Every execution is a `ToolEvent` whose
`data` names the chunks that it brought and their documents: rewards judge the trajectory by it, pruned or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspan.errors import InputError
from inspan.harness.search.tokens import Count, estimate
from inspan.harness.search.view import shown
from inspan.harness.tools import Faults, schema
from inspan.retrieval.base import Chunk, Retriever
from inspan.trace.records import ToolEvent

SEARCH = schema(
    "search_corpus", "Search the corpus; returns the chunks that fit best and were not shown yet.", query="what to find"
)
GREP = schema("grep_corpus", "Find chunks that a regular expression matches.", pattern="the regular expression")
READ = schema(
    "read_document",
    "Read all chunks of a document that were not shown yet.",
    doc_id="the document: an id without its part",
)
SCHEMAS = (SEARCH, GREP, READ)
PLAIN_ROOM = 4096  # tokens that a plain `call` brings at most, by the estimate
LATENCY_S = {"search_corpus": 0.3, "grep_corpus": 0.2, "read_document": 0.2}


@dataclass(frozen=True, slots=True)
class Found:
    """What a tool brought: chunks, and a text beside them (an error, or what is missing)."""

    chunks: Sequence[Chunk] = ()
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether the tool worked."""
        return not self.text.startswith("error:")


@dataclass(frozen=True, slots=True)
class Want:
    """What the one who asks can take: `room` tokens by `count`, none of the chunks `seen`.

    `focus` says what matters of a document that does not fit.
    """

    room: int = PLAIN_ROOM
    count: Count = estimate
    seen: Collection[str] = ()
    focus: str = ""


@dataclass(slots=True)
class CorpusTools:
    """A rollout's view of a corpus. Implements `Toolbox`."""

    corpus: Retriever
    candidates: int = 50
    grep_chunks: int = 5
    faults: Faults = field(default_factory=Faults)
    latency_s: Mapping[str, float] = field(default_factory=lambda: dict(LATENCY_S))
    on_event: Callable[[ToolEvent], None] | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the three tools."""
        return list(SCHEMAS)

    async def call(self, name: str, arguments: Mapping[str, Any], *, call_id: str, session: str = "") -> str:
        """Run a tool for an agent that keeps no account of what it saw; a sub-agent's session is named by its task."""
        found = self.find(name, arguments, Want(focus=session), call_id=call_id, session=session)
        return "\n".join([*(shown(chunk) for chunk in found.chunks), *([found.text] if found.text else [])])

    def find(self, name: str, arguments: Mapping[str, Any], want: Want, *, call_id: str, session: str = "") -> Found:
        """Run a tool and record it."""
        fault = self.faults.draw(name, arguments, session)
        found = Found(text=fault) if fault else self._find(name, arguments, want)
        data = {"chunks": [c.id for c in found.chunks], "documents": [c.document for c in found.chunks]}
        self.record(name, call_id, session, "" if found.ok else found.text, data)
        return found

    def record(self, name: str, call_id: str, session: str, error: str, data: Mapping[str, Any]) -> None:
        """Record an execution; `error` is empty when it worked."""
        if self.on_event:
            event = ToolEvent(session, call_id, name, not error, self.latency_s.get(name, 0.0), error, data)
            self.on_event(event)

    def _find(self, name: str, arguments: Mapping[str, Any], want: Want) -> Found:
        try:
            if name == "search_corpus":
                return self._search(_text(arguments, "query"), want)
            if name == "grep_corpus":
                hits = self.corpus.grep(_text(arguments, "pattern"), self.grep_chunks, exclude=want.seen)
                return _fitting([hit.chunk for hit in hits], want)
            if name == "read_document":
                return self._read(_text(arguments, "doc_id"), want)
        except InputError as error:  # what the model asked for cannot be had
            return Found(text=f"error: {error.what}")
        return Found(text=f"error: no tool {name}")

    def _search(self, query: str, want: Want) -> Found:
        hits = self.corpus.search(query, self.candidates, exclude=want.seen)
        return _fitting([hit.chunk for hit in hits], want)

    def _read(self, id: str, want: Want) -> Found:
        """A document's new chunks in order; where not all fit, those that suit the focus best."""
        whole = list(self.corpus.document(id))
        chunks = [chunk for chunk in whole if chunk.id not in want.seen]
        if sum(want.count(shown(chunk)) for chunk in chunks) > want.room and want.focus:
            ids = {chunk.id for chunk in chunks}
            ranked = [hit.chunk for hit in self.corpus.search(want.focus, self.candidates) if hit.chunk.id in ids]
            best = {chunk.id: place for place, chunk in enumerate(ranked)}
            chunks.sort(key=lambda chunk: best.get(chunk.id, len(best)))  # stable: the others keep their order
        found = _fitting(chunks, want)
        taken = {chunk.id for chunk in found.chunks}
        missing = len(chunks) - len(taken)
        text = f"{missing} more do not fit" if taken and missing else found.text
        return Found([chunk for chunk in whole if chunk.id in taken], text)


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be a text")
    return value.strip()


def _fitting(chunks: Sequence[Chunk], want: Want) -> Found:
    """The chunks that fit into the room, in their order; a chunk that is too large does not keep the others out."""
    taken: list[Chunk] = []
    left = want.room
    sizes = [want.count(shown(chunk)) for chunk in chunks]
    for chunk, size in zip(chunks, sizes, strict=True):
        if size <= left:
            taken.append(chunk)
            left -= size
    if chunks and not taken:
        return Found(
            text=f"error: the smallest chunk has {min(sizes)} tokens, there is room for {want.room}; prune first"
        )
    return Found(taken, "" if taken else "nothing new found")
