"""What a task is. Contract: plain data; a task knows nothing of harnesses, models or rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One problem with its ground truth.

    `answer` is a string, or a table: a tuple of rows, each a tuple of cells, in the order of `columns`. `keys` names
    the columns on which rows are aligned. `kind` groups tasks in reports ("wide", "deep", "narrow"...).
    """

    id: str
    prompt: str
    answer: str | tuple[tuple[str, ...], ...] | None
    kind: str = "task"
    columns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
