"""From what a program left to its answer. Contract: pure; what cannot be found is a `ValueError` that says so."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any


def pick(text: str, how: str) -> str:
    """The part of an output that is the answer: see `Command.pick`."""
    kind, _, rest = how.partition(":")
    if kind == "whole":
        return text.strip()
    if kind == "last_line":
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    if kind == "json":
        return _from_json(text, rest)
    found = list(re.finditer(rest, text, re.MULTILINE))
    if not found:
        raise ValueError(f"nothing in its output matches {rest!r}")
    return (found[-1][1] if found[-1].re.groups else found[-1][0]) or ""


def _from_json(text: str, path: str) -> str:
    """The value at a key path: of the output if that is JSON as a whole, else of its last line that has it."""
    for candidate in (text, *reversed(text.splitlines())):
        try:
            value: Any = json.loads(candidate)
            for key in path.split("."):
                value = value[int(key)] if isinstance(value, list) else value[key]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            continue
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    raise ValueError(f"no line of its output is JSON with {path!r}")


def diff(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    """What changed between two trees (path → content), as a unified diff; of binary files only that they differ."""
    parts = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
        one, other = _lines(old), _lines(new)
        if one is None or other is None:
            parts.append(f"Binary files {names[0]} and {names[1]} differ\n")
            continue
        for line in difflib.unified_diff(one, other, *names):
            parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def _lines(content: bytes | None) -> list[str] | None:
    """The lines of a text, split at newlines alone; None of what is not UTF-8 text."""
    if content is None:
        return []
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    *lines, rest = text.split("\n")
    return [line + "\n" for line in lines] + ([rest] if rest else [])
