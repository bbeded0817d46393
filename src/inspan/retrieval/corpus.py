"""Documents and where they come from: a folder of text or Markdown, or a JSONL file. Contract: ids are unique."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from inspan.errors import CorpusError

TEXT_ENDINGS = (".txt", ".md", ".markdown", ".rst", ".text")


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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"not UTF-8 (byte {error.start})", where=str(path), hint="convert it with iconv -t utf-8"
        ) from None
    except OSError as error:
        raise CorpusError(str(error.strerror or error), where=str(path)) from None


def _from_folder(folder: Path) -> list[Document]:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix.lower() in TEXT_ENDINGS)
    return [Document(f.relative_to(folder).as_posix(), _text(f)) for f in files]


def _from_jsonl(path: Path) -> list[Document]:
    documents = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CorpusError(f"not JSON: {error}", where=where) from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise CorpusError('a line needs a "text" string', where=where, hint='{"id": "…", "text": "…"}')
        documents.append(Document(str(row.get("id", number)), row["text"]))
    return documents
