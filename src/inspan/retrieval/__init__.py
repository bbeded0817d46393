"""Finding documents: corpora from disk, BM25 search."""
