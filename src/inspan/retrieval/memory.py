"""An index of chunks in memory, for corpora that a program makes. Contract: `Retriever`, deterministic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from inspan.errors import CorpusError, InputError
from inspan.retrieval.base import Chunk, Hit, Retriever
from inspan.retrieval.bm25 import Bm25Index
from inspan.retrieval.chunks import spans, tokens
from inspan.retrieval.corpus import Document, load_corpus
from inspan.retrieval.index import CHUNK_TOKENS, Index
from inspan.retrieval.patterns import linear
from inspan.tasks.retrieval.passages import Passage


class MemoryIndex:
    """BM25 over the chunks' text. Raises CorpusError when two chunks have one id, or there is none."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = {chunk.id: chunk for chunk in chunks}
        if len(self._chunks) < len(chunks) or not chunks:
            raise CorpusError("ids of chunks must be unique, and there must be some", hint="give each chunk its own id")
        self._documents: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            self._documents.setdefault(chunk.document, []).append(chunk)
        self._index = Bm25Index([Document(chunk.id, chunk.text) for chunk in chunks])

    def search(self, query: str, count: int, *, exclude: Collection[str] = ()) -> list[Hit]:
        """The best `count` chunks, best first."""
        found = self._index.search(query, count + len(exclude))
        hits = [Hit(self._chunks[document.id], score) for document, score in found if document.id not in exclude]
        return hits[:count]

    def grep(self, pattern: str, count: int, *, exclude: Collection[str] = ()) -> list[Hit]:
        """The first `count` chunks that a regular expression matches. Raises InputError for a bad pattern."""
        expression = linear(pattern)
        found = (chunk for chunk in self._chunks.values() if chunk.id not in exclude and expression.search(chunk.text))
        return [Hit(chunk, 1.0) for chunk, _ in zip(found, range(count), strict=False)]

    def document(self, id: str) -> Sequence[Chunk]:
        """All chunks of a document, in order. Raises InputError when there is no such document."""
        if id not in self._documents:
            raise InputError(f"no document {id}")
        return self._documents[id]

    def chunk(self, id: str) -> Chunk:
        """One chunk. Raises InputError when there is none of that id."""
        if id not in self._chunks:
            raise InputError(f"no chunk {id}")
        return self._chunks[id]


def index_passages(passages: Iterable[Passage]) -> MemoryIndex:
    """The passages of a program-made corpus as chunks."""
    return MemoryIndex([Chunk(p.id, p.document, p.text, 0, tokens(p.text)) for p in passages])


def index_documents(documents: Iterable[Document], *, most: int = CHUNK_TOKENS) -> MemoryIndex:
    """Documents cut into chunks, with the ids that an index on disk would give them. Raises CorpusError."""
    chunks = [
        Chunk(f"{one.id}#{part}", one.id, one.text[begin:end], begin, tokens(one.text[begin:end]))
        for one in documents
        for part, (begin, end) in enumerate(spans(one.text, most))
    ]
    return MemoryIndex(chunks)


def open_corpus(path: str | Path) -> Retriever:
    """A corpus to search in: an index that `inspan index` made, or a folder or JSONL of documents, indexed in memory.

    Raises CorpusError for what cannot be read.
    """
    if (Path(path) / "manifest.json").is_file():
        return Index(path)
    return index_documents(load_corpus(path))
