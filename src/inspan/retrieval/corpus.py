"""Documents and where they come from: a folder of text or Markdown, or a JSONL file. Contract: ids are unique."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inspan.config.files import read_rows, read_text
from inspan.errors import CorpusError

TEXT_ENDINGS = (".txt", ".md", ".markdown", ".rst", ".text")
_EXAMPLE = '{"id": "…", "text": "…"}'


@dataclass(frozen=True, slots=True)
class Document:
    """A document. `id` is what `read` takes; a document that is not `listed` is never found by search."""

    id: str
    text: str
    listed: bool = True


def load_corpus(path: str | Path) -> list[Document]:
    """Read a corpus. Raises `CorpusError` naming the file (and line) for what cannot be read."""
    path = Path(path)
    if path.is_dir():
        documents = _from_folder(path)
    elif path.is_file():
        documents = _from_jsonl(path)
    else:
        raise CorpusError("no such file or folder", where=str(path), hint="give a folder of text files or a .jsonl")
    if not documents:
        raise CorpusError("the corpus is empty", where=str(path), hint=f"looked for {', '.join(TEXT_ENDINGS)}")
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise CorpusError(f"two documents are called {document.id!r}", where=str(path), hint="make ids unique")
        seen.add(document.id)
    return documents


def _from_folder(folder: Path) -> list[Document]:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix.lower() in TEXT_ENDINGS)
    return [Document(f.relative_to(folder).as_posix(), read_text(f, CorpusError)) for f in files]


def _from_jsonl(path: Path) -> list[Document]:
    documents = []
    for number, where, row in read_rows(path, CorpusError, example=_EXAMPLE):
        if not isinstance(row.get("text"), str):
            raise CorpusError('a line needs a "text" string', where=where, hint=_EXAMPLE)
        name = row.get("id", number)
        if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
            hint = "give a text or a whole number, or leave it out"
            raise CorpusError(f"id is {name!r}", where=where, hint=hint)
        documents.append(Document(str(name), row["text"]))
    return documents
