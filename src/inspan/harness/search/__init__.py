"""The search agent of Context-1: it finds the documents that support an answer, and prunes its own context."""
