"""A corpus on disk, cut into chunks and indexed. Contract: `Retriever`; opened in milliseconds, and always whole.

    <folder>/manifest.json            written last: what stands beside it is complete
    <folder>/<generation>/corpus.db   documents, chunks and their terms (SQLite)
    <folder>/<generation>/*.index.*   BM25 scores (bm25s), mapped into memory

Documents stand in the order of their ids, so an index to which some were added and from which others were taken away is
the one that would be built anew. A change writes a new generation and reuses the terms of what stayed; the old one is
removed when the manifest names the new. Killed at any point, one of the two is there.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np

from inspan.errors import CorpusError, InputError
from inspan.retrieval.base import Chunk, Hit
from inspan.retrieval.bm25 import MAX_QUERY_TERMS, terms
from inspan.retrieval.chunks import spans, tokens
from inspan.retrieval.corpus import Document
from inspan.retrieval.patterns import linear

VERSION: Final = 1
CHUNK_TOKENS: Final = 256
_TERMS: Final = "words and four-letter beginnings, 1"  # names the tokenizer: another one is another index
_SCHEMA: Final = """
CREATE TABLE documents (id TEXT PRIMARY KEY, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE chunks (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, document TEXT NOT NULL,
    start INTEGER NOT NULL, tokens INTEGER NOT NULL, text TEXT NOT NULL, terms BLOB NOT NULL);
CREATE INDEX chunks_of ON chunks (document);
CREATE TABLE terms (term TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Change:
    """What an update did, in documents."""

    added: int
    kept: int
    removed: int
    chunks: int


def update(
    folder: Path,
    put: Iterable[Document],
    *,
    remove: Collection[str] = (),
    whole: bool = False,
    most: int = CHUNK_TOKENS,
) -> Change:
    """Put documents into the index at `folder` (made if it is not there) and take others out; `whole`: those given are
    all. Raises `CorpusError`: two documents of one id, nothing left, an index that cannot be read."""
    given: dict[str, Document] = {}
    for document in put:
        if document.id in given:
            raise CorpusError(f"two documents are called {document.id!r}", where=str(folder), hint="make ids unique")
        given[document.id] = document
    before = _manifest(folder) if (folder / "manifest.json").exists() else None
    if before is not None:
        _check(before, folder)
        most = int(before["chunk_tokens"])
    old = _open(folder / before["generation"] / "corpus.db") if before else None
    try:
        known = dict(old.execute("SELECT id, digest FROM documents")) if old else {}
        gone = set(remove) | (known.keys() - given.keys() if whole else set())
        if missing := set(remove) - known.keys():
            raise CorpusError(f"no document {min(missing)!r} to remove", where=str(folder))
        names = sorted((known.keys() - gone) | given.keys())
        if not names:
            raise CorpusError("the corpus is empty", where=str(folder), hint="an index needs a document")
        fresh = {name for name, one in given.items() if known.get(name) != _digest(one.text)}
        generation = f"g{int(before['generation'][1:]) + 1 if before else 1:06d}"
        target = folder / generation
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        count = _write(target, names, {name: given[name] for name in fresh}, old, most)
    finally:
        if old is not None:
            old.close()
    manifest = {
        "version": VERSION, "terms": _TERMS, "chunk_tokens": most, "generation": generation,
        "documents": len(names), "chunks": count,
    }  # fmt: skip
    partial = folder / "manifest.json.part"
    partial.write_text(json.dumps(manifest), encoding="utf-8")
    os.replace(partial, folder / "manifest.json")
    if before is not None:
        shutil.rmtree(folder / before["generation"], ignore_errors=True)
    return Change(len(fresh), len(names) - len(fresh), len(known.keys() - set(names)), count)


def _write(
    target: Path, names: Sequence[str], fresh: Mapping[str, Document], old: sqlite3.Connection | None, most: int
) -> int:
    """Write a generation; the number of its chunks."""
    import bm25s

    vocabulary: dict[str, int] = {}
    ids: list[list[int]] = []
    old_terms = {number: term for term, number in old.execute("SELECT term, number FROM terms")} if old else {}
    db = _open(target / "corpus.db")
    try:
        db.executescript(_SCHEMA)
        for name in names:
            rows, digest = (
                (_cut(fresh[name], most), _digest(fresh[name].text)) if name in fresh else _kept(old, name, old_terms)
            )
            db.execute("INSERT INTO documents VALUES (?,?)", (name, digest))
            for id, start, count, text, words in rows:
                numbers = [vocabulary.setdefault(word, len(vocabulary)) for word in words]
                db.execute(
                    "INSERT INTO chunks (id, document, start, tokens, text, terms) VALUES (?,?,?,?,?,?)",
                    (id, name, start, count, text, array("i", numbers).tobytes()),
                )
                ids.append(numbers)
        db.executemany("INSERT INTO terms VALUES (?,?)", vocabulary.items())
        db.commit()
    finally:
        db.close()
    index = bm25s.BM25(method="lucene")
    index.index((ids, vocabulary), show_progress=False)
    index.save(target, show_progress=False)
    return len(ids)


_Row = tuple[str, int, int, str, Sequence[str]]


def _cut(document: Document, most: int) -> list[_Row]:
    """The chunks of a document: id, beginning, tokens, text and terms."""
    rows = []
    for part, (begin, end) in enumerate(spans(document.text, most)):
        text = document.text[begin:end]
        rows.append((f"{document.id}#{part}", begin, tokens(text), text, terms(f"{document.id}\n{text}")))
    return rows


def _kept(old: sqlite3.Connection | None, name: str, words: Mapping[int, str]) -> tuple[list[_Row], bytes]:
    assert old is not None
    (digest,) = old.execute("SELECT digest FROM documents WHERE id = ?", (name,)).fetchone()
    query = "SELECT id, start, tokens, text, terms FROM chunks WHERE document = ? ORDER BY number"
    rows = []
    for id, start, count, text, packed in old.execute(query, (name,)):
        numbers = array("i")
        numbers.frombytes(packed)
        rows.append((id, start, count, text, [words[number] for number in numbers]))
    return rows, digest


class Index:
    """An index on disk, opened for reading. Raises `CorpusError`: none there, another version, damaged."""

    def __init__(self, folder: str | Path) -> None:
        import bm25s

        self.folder = Path(folder)
        self.manifest = _manifest(self.folder)
        _check(self.manifest, self.folder)
        home = self.folder / self.manifest["generation"]
        try:
            self._bm25 = bm25s.BM25.load(home, mmap=True, load_vocab=False, show_progress=False, verbosity=0)
            self._db = sqlite3.connect(f"file:{home / 'corpus.db'}?mode=ro", uri=True, check_same_thread=False)
            (found,) = self._db.execute("SELECT count(*) FROM chunks").fetchone()
        except (OSError, ValueError, EOFError, KeyError, TypeError, sqlite3.Error) as error:
            raise _damaged(self.folder, error) from error
        if found != self.manifest["chunks"]:
            raise _damaged(self.folder, f"{found} chunks, not {self.manifest['chunks']}")
        self._count = found

    def search(self, query: str, count: int, *, exclude: Collection[str] = ()) -> list[Hit]:
        """The best `count` chunks with a positive score, best first; ties stand in the order of the corpus."""
        words = list(dict.fromkeys(terms(query[:100_000])))[:MAX_QUERY_TERMS]
        numbers = [row[0] for word in words if (row := self._one("SELECT number FROM terms WHERE term = ?", word))]
        if not numbers or count < 1:
            return []
        scores = np.array(self._bm25.get_scores_from_ids(numbers))
        for id in exclude:
            row = self._one("SELECT number FROM chunks WHERE id = ?", id)
            if row:
                scores[row[0] - 1] = 0.0
        count = min(count, len(scores))
        cut = np.partition(scores, len(scores) - count)[len(scores) - count]
        best = np.flatnonzero(scores >= max(cut, np.finfo(scores.dtype).tiny))
        order = best[np.argsort(-scores[best], kind="stable")][:count]
        return [Hit(self._chunk("number", int(at) + 1), float(scores[at])) for at in order]

    def grep(self, pattern: str, count: int, *, exclude: Collection[str] = ()) -> list[Hit]:
        """The first `count` chunks that a regular expression matches, in linear time (RE2). Raises `InputError`."""
        expression = linear(pattern)
        hits: list[Hit] = []
        left_out = set(exclude)
        for id, document, start, size, text in self._db.execute(f"{_CHUNK} ORDER BY number"):
            if len(hits) >= count:
                break
            if id not in left_out and expression.search(text):
                hits.append(Hit(Chunk(id, document, text, start, size), 1.0))
        return hits

    def document(self, id: str) -> Sequence[Chunk]:
        """All chunks of a document, in order. Raises InputError when there is no such document."""
        rows = self._db.execute(f"{_CHUNK} WHERE document = ? ORDER BY number", (id,)).fetchall()
        if not rows:
            raise InputError(f"no document {id}")
        return [Chunk(name, document, text, start, size) for name, document, start, size, text in rows]

    def chunk(self, id: str) -> Chunk:
        """One chunk. Raises InputError when there is none of that id."""
        return self._chunk("id", id)

    def close(self) -> None:
        """Close the files."""
        self._db.close()

    def _chunk(self, column: str, value: object) -> Chunk:
        row = self._one(f"{_CHUNK} WHERE {column} = ?", value)
        if row is None:
            raise InputError(f"no chunk {value}")
        name, document, start, size, text = row
        return Chunk(name, document, text, start, size)

    def _one(self, query: str, value: object) -> Any:
        return self._db.execute(query, (value,)).fetchone()


_CHUNK: Final = "SELECT id, document, start, tokens, text FROM chunks"


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {**data, "generation": str(data["generation"]), "version": int(data["version"])}
    except FileNotFoundError:
        raise CorpusError(
            "there is no index", where=str(folder), hint="make one: inspan index FOLDER --out DIR"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from error


def _check(manifest: Mapping[str, Any], folder: Path) -> None:
    if manifest["version"] != VERSION or manifest.get("terms") != _TERMS:
        made = f"version {manifest['version']}, terms {manifest.get('terms')!r}"
        raise CorpusError(
            f"the index was made otherwise ({made})", where=str(folder), hint="build it anew: inspan index"
        )


def _damaged(folder: Path, error: object) -> CorpusError:
    return CorpusError(f"the index is damaged: {error}", where=str(folder), hint="build it anew: inspan index")


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
