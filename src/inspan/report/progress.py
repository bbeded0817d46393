"""The view of a run while it runs: a live panel on a terminal, plain lines without one. Contract: showing never changes
or stops a run, and what a metric lacks is left out, not invented.

Metric names are those of docs/run-directory.md; nested tables are joined by "/".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from inspan.progress import Progress
from inspan.report.chart import number
from inspan.report.columns import duration
from inspan.report.run import flatten

_SPARKS = "▁▂▃▄▅▆▇█"
_SHOWN = (
    ("reward", ("reward", "reward_mean")),
    ("F1", ("item_f1", "f1")),
    ("width", ("parallel_width", "width")),
    ("steps", ("critical_steps",)),
    ("failed", ("failed",)),
    ("entropy", ("entropy",)),
    ("tok/s", ("rollout_tokens_per_s", "tokens_per_s", "tok_s")),
)


def sparkline(values: list[float], width: int = 32) -> str:
    """Values as a row of blocks, the last `width` of them averaged into equal parts."""
    if not values:
        return ""
    parts = min(width, len(values))
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((m - low) / span * top) if span > 0 else top // 2] for m in means)


@dataclass(slots=True)
class State:
    """What is known of a run so far; both views draw from it."""

    clock: Callable[[], float] = time.monotonic
    name: str = "run"
    total: int = 0
    done: int = 0
    phase: str = "starting"
    series: dict[str, list[float]] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    resumed_at: int = 0

    def start(self, recipe: Any, total: int, done: int) -> None:
        """See `Progress.start`."""
        self.name = str(getattr(recipe, "name", recipe) or "run")
        self.total, self.done, self.resumed_at, self.began = total, done, done, self.clock()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """See `Progress.update`; the count comes from the metrics' `update` when it is there."""
        self.last = dict(flatten(metrics))
        self.done += 1
        for label, names in _SHOWN:
            found = next((self.last[n] for n in names if n in self.last), None)
            if found is not None:
                self.series.setdefault(label, []).append(found)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.began

    @property
    def remaining(self) -> float | None:
        """Seconds left at the pace so far; None before the first update."""
        made = self.done - self.resumed_at
        return self.elapsed / made * (self.total - self.done) if made > 0 else None

    def figures(self) -> list[tuple[str, str]]:
        """The newest figures as (label, text), the weights of annealed terms last."""
        newest = {label: self.series[label][-1] for label, _ in _SHOWN if self.series.get(label)}
        out = [(label, number(value)) for label, value in newest.items() if value or label != "failed"]
        weights = [(k, v) for k, v in self.last.items() if k.startswith(("weights/", "weight/"))]
        return out + [
            ("λ " + k.split("/", 1)[1], number(v))
            for k, v in weights
            if not k.endswith(("item_f1", "exact_match", "retrieval"))
        ]


class PlainProgress:
    """One line an update, for logs and pipes."""

    def __init__(self, write: Callable[[str], None] = print, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._state = write, State(clock)

    def start(self, recipe: Any, total: int, done: int = 0) -> None:
        """See `Progress.start`."""
        self._state.start(recipe, total, done)
        self._write(f"{self._state.name}: {total} updates" + (f", going on from {done}" if done else ""))

    def phase(self, name: str) -> None:
        """A line for phases outside the updates; those of each update would drown the log."""
        if name != self._state.phase and name not in ("rollouts", "learning"):
            self._write(f"{name} …")
        self._state.phase = name

    def update(self, metrics: Mapping[str, Any]) -> None:
        """See `Progress.update`."""
        state = self._state
        state.update(metrics)
        figures = "  ".join(f"{label} {text}" for label, text in state.figures())
        left = state.remaining
        eta = f"  {duration(left)} left" if left is not None and state.done < state.total else ""
        self._write(f"update {state.done:>{len(str(state.total))}}/{state.total}  {figures}{eta}")

    def finish(self, summary: Any = None) -> None:
        """See `Progress.finish`."""
        if self._state.total:  # else it was stopped before it started, or it only evaluated
            self._write(f"{self._state.done} of {self._state.total} updates in {duration(self._state.elapsed)}")


class LiveProgress:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._state = console, State(clock)
        self._live: Live | None = None

    def start(self, recipe: Any, total: int, done: int = 0) -> None:
        """See `Progress.start`."""
        self._state.start(recipe, total, done)
        self._live = Live(get_renderable=self.panel, console=self._console, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str) -> None:
        """See `Progress.phase`."""
        self._state.phase = name

    def update(self, metrics: Mapping[str, Any]) -> None:
        """See `Progress.update`."""
        self._state.update(metrics)

    def finish(self, summary: Any = None) -> None:
        """See `Progress.finish`; may be called twice."""
        if self._live is not None:
            self._state.phase = "finished" if summary is not None else "stopped"
            self._live.stop()
            self._live = None

    def panel(self) -> Panel:
        """The panel as it stands."""
        state = self._state
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        left = state.remaining
        times = duration(state.elapsed) + (f", {duration(left)} left" if left is not None else "")
        bar = ProgressBar(total=max(1, state.total), completed=state.done, complete_style="cyan", finished_style="cyan")
        head.add_row(Text(f"{state.done}/{state.total}", style="bold"), bar, Text(times, style="dim"))
        body = Table.grid(padding=(0, 3))
        for label, text in state.figures():
            curve = sparkline(state.series[label]) if label in state.series else ""
            body.add_row(Text(label, style="dim"), Text(text, style="bold"), Text(curve, style="cyan"))
        if not state.last:
            body.add_row(Text("no update finished yet", style="dim"))
        subtitle = Text(state.phase, style="dim")
        return Panel(
            Group(head, Text(""), body), title=Text(state.name), subtitle=subtitle, title_align="left", padding=(1, 2)
        )


def make_progress(console: Console | None = None) -> Progress:
    """The live view when `console` is a terminal, else plain lines that are flushed as they come."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console)
    return PlainProgress(lambda line: print(line, file=console.file, flush=True))
