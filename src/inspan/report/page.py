"""`report.html`: one self-contained page. Contract: no external resource, no markup from a model, readable in light and
dark, and a page for every run directory, however little it holds.

A content security policy in the page allows its own script and style alone, by hash: even if text were to slip
through the escaping, it could run nothing and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from inspan.errors import StoreError
from inspan.report import curves, trajectory
from inspan.report.columns import ARMS, DASH, KINDS, Column, duration, numeric, shown, tables, title
from inspan.report.run import REPORT, Run, read_run


def build(run_dir: str | Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Raises InputError when the directory is no run, StoreError when the page cannot be written.
    """
    run = read_run(run_dir)
    target = run.path / REPORT
    partial = target.with_suffix(".part")
    try:
        partial.write_text(render(run), encoding="utf-8", errors="backslashreplace")
        os.replace(partial, target)
    except OSError as error:
        raise StoreError(
            f"cannot write the report: {error.strerror}",
            where=str(target),
            hint="free space, or copy the run to a folder that can be written",
        ) from None
    return target


def render(run: Run) -> str:
    """The page as text."""
    style, script = _asset("report.css"), _asset("report.js")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    policy += "; base-uri 'none'; form-action 'none'"
    main, more = curves.draw(run.series)
    sections = [_head(run), _results(run), _kinds(run)]
    if main:
        sections.append(f'<section><h2>Over the updates</h2><div class="grid3">{"".join(main)}</div></section>')
    if more:
        figures = "".join(more)
        summary = f"<summary>{len(more)} more metrics</summary>"
        sections.append(f'<details class="more">{summary}<div class="grid3">{figures}</div></details>')
    sections += [_trajectories(run), _recipe(run)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · Inspan</title><style>{style}</style></head>"
        f"<body><main>{''.join(sections)}</main><script>{script}</script></body></html>\n"
    )


def _head(run: Run) -> str:
    summary, recipe = run.summary, run.recipe
    updates = summary.get("updates", run.updates)
    facts = [("updates", str(updates)), ("seed", str(summary.get("seed", recipe.get("seed", DASH))))]
    if (wall := numeric(summary.get("wall_s"))) is not None:
        facts.append(("time", duration(wall)))
    if (peak := numeric(summary.get("peak_rss_mb"))) is not None:
        facts.append(("peak memory", f"{peak / 1024:.2f} GiB"))
    facts += [(key, str(recipe[key])) for key in ("model", "harness") if recipe.get(key)]
    train = recipe.get("train")
    if isinstance(train, Mapping):
        facts += [(key, str(train[key])) for key in ("objective", "credit") if train.get(key)]
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{trajectory.text(v, 60)}</dd></div>" for k, v in facts)
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    warning = f'<ul class="notes">{notes}</ul>' if notes else ""
    name = f'<p class="eyebrow">Inspan run</p><h1>{trajectory.text(run.name, 80)}</h1>'
    return f"<header>{name}<dl>{cells}</dl>{warning}</header>"


def _results(run: Run) -> str:
    arms = tables(run.summary.get("arms"), ARMS)
    if not arms:
        return ""
    return f"<section><h2>On held-out tasks</h2>{_arms(arms)}</section>"


def _kinds(run: Run) -> str:
    return _grouped(run, "by_kind", KINDS, "By kind of task") + _grouped(run, "by_split", (), "Out of distribution")


def _grouped(run: Run, key: str, order: tuple[str, ...], heading: str) -> str:
    groups = tables(run.summary.get(key), order)
    parts = [
        f"<div><h3>{trajectory.text(title(name), 40)}</h3>{_arms(arms)}</div>"
        for name in groups
        if (arms := tables(groups[name], ARMS))
    ]
    return f'<section><h2>{heading}</h2><div class="kinds">{"".join(parts)}</div></section>' if parts else ""


def _arms(arms: Mapping[str, Mapping[str, Any]]) -> str:
    columns = shown(arms)
    head = "".join(f'<th title="{escape(c.about)}">{escape(c.label)}</th>' for c in columns)
    body = ""
    for name, arm in arms.items():
        cells = "".join(_cell(column, arm, list(arms.values())) for column in columns)
        body += f"<tr><th>{trajectory.text(title(name), 40)}</th>{cells}</tr>"
    table = f'<table class="arms"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _cell(column: Column, arm: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> str:
    value = numeric(arm.get(column.key))
    others = [v for a in arms if (v := numeric(a.get(column.key))) is not None]
    best = ""
    if value is not None and column.better and len(set(others)) > 1:
        best = ' class="best"' if value == (max(others) if column.better > 0 else min(others)) else ""
    bar = ""
    if column.key in ("item_f1", "exact", "f1") and value is not None:
        full = min(100.0, max(0.0, value * 100))
        rect = f'<rect width="{full:.1f}" height="4"/>'
        bar = f'<svg class="bar" viewBox="0 0 100 4" preserveAspectRatio="none">{rect}</svg>'
    return f"<td{best}>{escape(column.text(arm))}{bar}</td>"


def _trajectories(run: Run) -> str:
    if not run.trajectories:
        return ""
    limits = run.recipe.get("limits")
    limits = limits if isinstance(limits, Mapping) else {}
    budget, width = numeric(limits.get("critical_steps")), numeric(limits.get("width"))
    shown = run.trajectories[-trajectory.MOST_TRAJECTORIES :]
    items = "".join(
        trajectory.show(
            item, budget=int(budget) if budget else None, width=int(width or 0), opened=index == len(shown) - 1
        )
        for index, item in enumerate(shown)
    )
    left = len(run.trajectories) - len(shown)
    note = f'<p class="none">{left} earlier ones are in trajectories.jsonl</p>' if left else ""
    return f"<section><h2>Trajectories</h2>{note}{items}</section>"


def _recipe(run: Run) -> str:
    path = run.path / "recipe.toml"
    if not run.recipe:
        return ""
    source = path.read_text(encoding="utf-8", errors="replace")
    shown = f'<pre class="recipe">{trajectory.text(source, 40000)}</pre>'
    return f'<section><details class="more"><summary>Recipe</summary>{shown}</details></section>'


def _asset(name: str) -> str:
    return resources.files("inspan.report").joinpath("assets", name).read_text(encoding="utf-8").strip()


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
