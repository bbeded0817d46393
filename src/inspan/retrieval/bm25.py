"""BM25 over documents, by `bm25s`. Contract: deterministic; ties break by document order.

Terms are lower-cased words and their four-letter beginnings, so that near names (Niger, Nigeria) compete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from inspan.retrieval.corpus import Document

_WORD = re.compile(r"\w+", re.UNICODE)
MAX_QUERY_TERMS = 64


def terms(text: str) -> list[str]:
    """The index terms of a text."""
    words = [word.lower() for word in _WORD.findall(text)]
    return words + [f"{word[:4]}~" for word in words if len(word) > 4 and not word.isdigit()]


class Bm25Index:
    """A BM25 index in memory over the listed documents."""

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s

        self._documents = [d for d in documents if d.listed]
        self._index = bm25s.BM25(method="lucene")
        self._vocabulary: dict[str, int] = {}
        ids = [
            [self._vocabulary.setdefault(t, len(self._vocabulary)) for t in terms(f"{d.id}\n{d.text}")]
            for d in self._documents
        ]
        if self._documents:
            self._index.index((ids, self._vocabulary), show_progress=False)

    def search(self, query: str, count: int) -> list[tuple[Document, float]]:
        """The best `count` documents with a positive score, best first. A query without known terms finds nothing."""
        known = [self._vocabulary[t] for t in terms(query)[:MAX_QUERY_TERMS] if t in self._vocabulary]
        if not known or not self._documents:
            return []
        scores = self._index.get_scores_from_ids(known)
        count = min(count, len(scores))
        # Take all that tie with the last place before sorting, so that ties break by document order, not by chance.
        cut = np.partition(scores, len(scores) - count)[len(scores) - count]
        best = np.flatnonzero(scores >= cut)
        order = best[np.argsort(-scores[best], kind="stable")][:count]
        return [(self._documents[i], float(scores[i])) for i in order if scores[i] > 0]
