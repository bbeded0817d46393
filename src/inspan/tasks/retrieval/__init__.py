"""Retrieval tasks: questions whose supporting chunks are to be found. The evidence, the ranked answer, a generator."""
