"""The result table in the terminal. Contract: the same figures as the page; plain text when there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inspan.report.columns import ARMS, KINDS, numeric, shown, tables, title


def arms_table(arms: Mapping[str, Mapping[str, Any]], heading: str = "") -> Table:
    """One table: an arm a row; the best figure of a column is bold."""
    table = Table(title=heading or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    table.add_column("")
    columns = shown(arms)
    for column in columns:
        table.add_column(column.label, justify="right", overflow="fold")
    for name, arm in arms.items():
        cells = []
        for column in columns:
            values = [v for other in arms.values() if (v := numeric(other.get(column.key))) is not None]
            own = numeric(arm.get(column.key))
            best = bool(column.better) and len(set(values)) > 1 and own == (max if column.better > 0 else min)(values)
            cells.append(Text(column.text(arm), style="bold green" if best else ""))
        table.add_row(Text(title(name)), *cells)
    return table


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table of a `summary.json`: all held-out tasks, then each kind and each other split."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=max(120, console.width))  # a log has no edge to wrap at
    arms = tables(summary.get("arms"), ARMS)
    if not arms:
        console.print("no arm was evaluated")
        return
    console.print(arms_table(arms, "On held-out tasks"))
    kinds = tables(summary.get("by_kind"), KINDS)
    for kind in kinds:
        if inner := tables(kinds[kind], ARMS):
            console.print(arms_table(inner, f"{title(kind)} tasks"))
    splits = tables(summary.get("by_split"), ())
    for split in splits:
        if inner := tables(splits[split], ARMS):
            console.print(arms_table(inner, f"On {title(split)}"))
