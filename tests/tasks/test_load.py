"""A user's task file: what is wrong is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspan.errors import TaskError
from inspan.tasks.load import load_tasks


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_texts_and_tables(tmp_path: Path) -> None:
    one = '{"prompt": "Capital of Niger?", "answer": "Niamey", "split": "held_out"}'
    table = '"answer": [["Niger", 1]], "columns": ["land", "n"], "keys": ["land"]'
    two = '{"id": "t", "prompt": "?", "kind": "wide", ' + table + "}"
    first, second = load_tasks(write(tmp_path, one, "", two))
    assert (first.id, first.answer, first.meta["split"]) == ("1", "Niamey", "held_out")
    assert (second.id, second.answer, second.keys, second.kind) == ("t", (("Niger", "1"),), ("land",), "wide")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "a line is an object"),
        ('{"answer": "x"}', "prompt"),
        ('{"prompt": " ", "answer": "x"}', "prompt"),
        ('{"prompt": "x"}', "without an answer"),
        ('{"prompt": "a\\ud800b", "answer": "x"}', "half of a surrogate pair"),
        ('{"prompt": "x", "answer": 3}', "a text or a list of rows"),
        ('{"prompt": "x", "answer": [["a", "b"]]}', "columns"),
        ('{"prompt": "x", "answer": [["a"]], "columns": ["a", "b"]}', "does not fit"),
        ('{"prompt": "x", "answer": [["a"]], "columns": ["a"], "keys": ["z"]}', "not one of the columns"),
        ('{"prompt": "x", "answer": "y", "anwser": "z"}', "unknown key 'anwser'"),
        ('{"prompt": "x", "answer": "y", "meta": 1}', "meta"),
        ('{"prompt": "x", "answer": "y", "split": "heldout"}', "unknown split 'heldout'"),
        ('{"prompt": "x", "answer": "y", "id": null}', "id is None"),
        ('{"prompt": "x", "answer": "y", "id": {"a": 1}}', "id is {'a': 1}"),
        ('{"prompt": "x", "answer": "y", "kind": true}', "kind is True"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks(write(tmp_path, '{"prompt": "fine", "answer": "x"}', line))
    assert "tasks.jsonl:2" in str(caught.value)


def test_whole_file_faults(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="empty"):
        load_tasks(write(tmp_path, "", " "))
    with pytest.raises(TaskError, match="two tasks"):
        load_tasks(write(tmp_path, *['{"id": "a", "prompt": "x", "answer": "y"}'] * 2))
    bad = tmp_path / "latin.jsonl"
    bad.write_bytes("é".encode("latin-1"))
    with pytest.raises(TaskError, match="not UTF-8"):
        load_tasks(bad)


def test_files_from_other_systems_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = ['{"prompt": "a\u2028b", "answer": "x"}', '{"prompt": "c", "answer": "y"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert [task.prompt for task in load_tasks(path)] == ["a\u2028b", "c"]
