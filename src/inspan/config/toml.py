"""Writing TOML (the standard library only reads it). Contract: `tomllib.loads(dumps(data)) == data` for every dict of
str, int, finite or infinite float, bool, dates and times, list and dict with string keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(data: Mapping[str, Any]) -> str:
    """Data as TOML: scalars first, then tables and arrays of tables."""
    lines: list[str] = []
    _table(data, (), lines)
    return "\n".join(lines).strip() + "\n"


def value(item: Any) -> str:
    """One value on one line; tables inline. Raises TypeError for what TOML cannot hold (None, objects)."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int):
        return str(item)
    if isinstance(item, float):
        return _float(item)
    if isinstance(item, str):
        return _string(item)
    if isinstance(item, (date, time)):  # a datetime is a date
        return item.isoformat()
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(value(x) for x in item) + "]"
    if isinstance(item, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {value(v)}" for k, v in item.items()) + " }" if item else "{}"
    raise TypeError(f"TOML cannot hold {item!r} of type {type(item).__name__}")


def _table(data: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    nested = {k: v for k, v in data.items() if _is_table(v) or _is_table_array(v)}
    lines.extend(f"{_key(k)} = {value(v)}" for k, v in data.items() if k not in nested)
    for key, item in nested.items():
        here = (*path, key)
        name = ".".join(_key(k) for k in here)
        if isinstance(item, Mapping):
            if not all(_is_table(v) or _is_table_array(v) for v in item.values()):
                lines.extend(["", f"[{name}]"])
            _table(item, here, lines)
            continue
        for table in item:
            lines.extend(["", f"[[{name}]]"])
            _table(table, here, lines)


def _is_table(item: Any) -> bool:
    """Flat small tables stay inline; tables of tables and long ones get a header."""
    return isinstance(item, Mapping) and (
        len(item) > 4 or any(isinstance(v, (Mapping, list, tuple)) for v in item.values())
    )


def _is_table_array(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and bool(item) and all(isinstance(x, Mapping) for x in item)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also forbids a raw DEL and has no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(number: float) -> str:
    if math.isinf(number) or math.isnan(number):
        return str(number)
    text = repr(number)
    return text if any(c in text for c in ".e") else text + ".0"
