"""What supports the answer of a retrieval task. Contract: plain data in `task.meta`, so that it travels and is stored.

    meta = {"hops": 2,
            "evidence": [["k17.2", "b03.1"], ["c40.0"]],    one list a fact: the chunks that hold it
            "documents": [["k17", "b03"], ["c40"]],         their documents, fact by fact
            "answer_chunks": ["c40.0"]}                     the chunks that hold the answer itself

Several chunks may hold a fact; one of them is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inspan.errors import TaskError
from inspan.tasks.base import Task

EXAMPLE = '"evidence": [["chunk-1", "chunk-2"], ["chunk-9"]], "answer_chunks": ["chunk-9"]'


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts of a task, each as the chunks (and documents) that hold it; `answer` are the chunks that hold it."""

    facts: tuple[frozenset[str], ...]
    documents: tuple[frozenset[str], ...]
    answer: frozenset[str]

    @property
    def chunks(self) -> frozenset[str]:
        """Every chunk that holds a fact."""
        return frozenset().union(*self.facts)


def evidence_of(task: Task) -> Evidence | None:
    """The evidence of a task; None when it is not a retrieval task. Raises TaskError for one that is malformed."""
    meta = task.meta
    if "evidence" not in meta:
        return None
    facts = _groups(meta["evidence"], "evidence", task)
    documents = _groups(meta["documents"], "documents", task) if meta.get("documents") else ()
    if documents and len(documents) != len(facts):
        what = f"{len(documents)} lists of documents for {len(facts)} facts"
        raise TaskError(what, where=f"task {task.id!r}", hint="give one list of documents for each fact, or none")
    return Evidence(facts, documents, _texts(meta.get("answer_chunks", []), "answer_chunks", task))


def _groups(value: Any, name: str, task: Task) -> tuple[frozenset[str], ...]:
    if not isinstance(value, list | tuple) or not value:
        raise TaskError(f"{name} must be a list of lists of ids", where=f"task {task.id!r}", hint=EXAMPLE)
    groups = tuple(_texts(group, name, task) for group in value)
    if not all(groups):
        raise TaskError(f"{name} has a fact that no chunk holds", where=f"task {task.id!r}", hint=EXAMPLE)
    return groups


def _texts(value: Any, name: str, task: Task) -> frozenset[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(id, str) for id in value):
        raise TaskError(f"{name} must hold lists of ids", where=f"task {task.id!r}", hint=EXAMPLE)
    return frozenset(value)
