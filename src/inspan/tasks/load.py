"""A user's own tasks: one JSON object a line. Contract: every task has a prompt and an answer, and an id of its own.

`{"prompt": "…", "answer": "text"}` or `{"prompt": "…", "answer": [["Niger", "Niamey"], …], "columns": ["country",
"capital"], "keys": ["country"]}`; also `id`, `kind`, `split` (`train` or `held_out`) and `meta`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inspan.config.files import read_rows
from inspan.errors import TaskError
from inspan.tasks.base import Task

_EXAMPLE = '{"prompt": "What is the capital of Niger?", "answer": "Niamey"}'
SPLITS = ("train", "held_out")
_KNOWN = {"id", "prompt", "answer", "kind", "columns", "keys", "split", "meta"}


def load_tasks(path: str | Path) -> list[Task]:
    """Read tasks from a JSONL file. Raises `TaskError` naming the line."""
    path = Path(path)
    tasks = [_task(row, where, number) for number, where, row in read_rows(path, TaskError, example=_EXAMPLE)]
    if not tasks:
        raise TaskError("the task set is empty", where=str(path), hint=f"one task a line: {_EXAMPLE}")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise TaskError(f"two tasks have the id {task.id!r}", where=str(path), hint="give each its own id")
        seen.add(task.id)
    return tasks


def _task(row: dict[str, Any], where: str, number: int) -> Task:
    if unknown := sorted(row.keys() - _KNOWN):
        raise TaskError(f"unknown key {unknown[0]!r}", where=where, hint=f"known: {', '.join(sorted(_KNOWN))}")
    if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise TaskError('a task needs a "prompt" text', where=where, hint=_EXAMPLE)
    answer, columns = _answer(row, where)
    keys = _texts(row.get("keys", []), "keys", where)
    if wrong := [key for key in keys if key not in columns]:
        raise TaskError(f"key {wrong[0]!r} is not one of the columns", where=where, hint=f"columns: {list(columns)}")
    meta = row.get("meta", {})
    if not isinstance(meta, dict):
        raise TaskError("meta must be an object", where=where)
    if "split" in row:
        if row["split"] not in SPLITS:
            raise TaskError(f"unknown split {row['split']!r}", where=where, hint=f"one of {', '.join(SPLITS)}, or none")
        meta = {**meta, "split": row["split"]}
    name, kind = (_name(row, key, where, default) for key, default in (("id", str(number)), ("kind", "task")))
    return Task(name, row["prompt"], answer, kind, columns, keys, meta)


def _name(row: dict[str, Any], key: str, where: str, default: str) -> str:
    value = row.get(key, default)
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise TaskError(f"{key} is {value!r}", where=where, hint="give a text or a whole number, or leave it out")
    return str(value)


def _answer(row: dict[str, Any], where: str) -> tuple[Any, tuple[str, ...]]:
    answer = row.get("answer")
    if answer is None:
        raise TaskError("a task without an answer", where=where, hint="give a text, or a table as a list of rows")
    if isinstance(answer, str):
        return answer, ()
    if not isinstance(answer, list) or not answer or not all(isinstance(r, list) and r for r in answer):
        raise TaskError("an answer is a text or a list of rows", where=where, hint='[["Niger", "Niamey"]]')
    columns = _texts(row.get("columns", []), "columns", where)
    if not columns:
        raise TaskError("a table needs its columns", where=where, hint='"columns": ["country", "capital"]')
    rows = tuple(tuple(str(cell) for cell in r) for r in answer)
    if wrong := [r for r in rows if len(r) != len(columns)]:
        raise TaskError(f"row {list(wrong[0])} does not fit the {len(columns)} columns", where=where)
    return rows, columns


def _texts(value: Any, name: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TaskError(f"{name} must be a list of texts", where=where)
    return tuple(value)
