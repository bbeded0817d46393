"""`inspan index`: from a folder of documents to an index on disk."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from inspan.errors import CorpusError


def index(corpus: Path, *, out: Path, chunk_tokens: int) -> None:
    """Bring the index at `out` to what the corpus holds now, and print what was done."""
    from inspan.retrieval.corpus import Document, load_corpus
    from inspan.retrieval.index import update
    from inspan.retrieval.readers import Skipped, read_document

    began = time.monotonic()
    skipped: Counter[str] = Counter()
    documents: list[Document] = []
    if corpus.is_dir():
        for path in sorted(path for path in corpus.rglob("*") if path.is_file()):
            try:
                documents.append(Document(path.relative_to(corpus).as_posix(), read_document(path)))
            except Skipped as reason:
                skipped[str(reason)] += 1
            except OSError as error:
                skipped[error.strerror or "cannot be read"] += 1
    else:
        documents = load_corpus(corpus)
    for reason, count in skipped.most_common():
        print(f"skipped {count:,}: {reason}", file=sys.stderr)
    if not documents:
        hint = "it reads text, Markdown, reStructuredText, HTML, manual pages, PDF and JSONL"
        raise CorpusError("the corpus is empty", where=str(corpus), hint=hint)
    change = update(out, documents, whole=True, most=chunk_tokens)
    seconds = time.monotonic() - began
    size = sum(len(document.text) for document in documents) / 1e6
    print(
        f"{len(documents):,} documents ({change.added:,} new or changed, {change.removed:,} removed), "
        f"{change.chunks:,} chunks: {out} ({seconds:.1f} s, {size / seconds:.1f} MB/s)"
    )
