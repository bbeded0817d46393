"""Reading the user's text files. Contract: UTF-8 (with or without a byte order mark), or the caller's error that names
the file, the line where there is one, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inspan.errors import InputError


def read_text(path: Path, error: type[InputError], *, hint: str | None = None) -> str:
    """The text of a file, lines ending in a newline alone; `hint` says what would have been right to give."""
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise error(f"cannot be read: {fault.strerror or fault}", where=str(path), hint=hint) from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as fault:
        remedy = "save it as UTF-8, e.g. with iconv -t utf-8"
        raise error(f"not UTF-8 (byte {fault.start})", where=str(path), hint=remedy) from None


def read_rows(path: Path, error: type[InputError], *, example: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its line number and its place ("file:line"); blank lines are skipped."""
    for number, line in enumerate(read_text(path, error, hint=example).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as fault:
            raise error(f"not JSON: {fault}", where=where, hint=example) from None
        if "\\u" in line and not _is_text(row):
            raise error("half of a surrogate pair, which is no character", where=where, hint="save it as UTF-8")
        if not isinstance(row, dict):
            raise error(f"a line is an object, not a {type(row).__name__}", where=where, hint=example)
        yield number, where, row


def _is_text(row: Any) -> bool:
    """Whether what JSON spelled can be written as UTF-8."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
