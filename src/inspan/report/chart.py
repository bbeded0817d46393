"""Line charts as inline SVG. Contract: pure functions from numbers to markup; every text is escaped; colours come from
the page's style sheet (classes s0, s1, ...), so that one chart serves light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 340, 176
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 8, 22
COLOURS = 6
SMOOTH_FROM = 12  # points from which the raw line fades behind its moving average


@dataclass(frozen=True, slots=True)
class Line:
    """A named series: x (update) → value."""

    label: str
    points: Mapping[int, float]


def chart(title: str, lines: Sequence[Line], *, about: str = "", zero: bool = False, smooth: bool = True) -> str:
    """A figure with legend and axes. `zero` includes 0 in the value axis; `smooth` draws a moving
    average over long series. Empty when no line has a point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = sorted({x for line in lines for x in line.points})
    values = [v for line in lines for v in line.points.values()]
    ticks = nice_ticks(min([0.0, *values] if zero else values), max([0.0, *values] if zero else values))
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        span = (xs[-1] - xs[0]) or 1
        across = LEFT + (WIDTH - LEFT - RIGHT) * ((x - xs[0]) / span if xs[-1] > xs[0] else 0.5)
        return round(across, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low), 1)

    svg = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in ticks:
        y = place(xs[0], tick)[1]
        svg.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        svg.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{number(tick)}</text>')
    for tick in _x_ticks(xs):
        x = place(tick, low)[0]
        svg.append(f'<text class="tick" x="{x}" y="{HEIGHT - 6}" text-anchor="middle">{tick}</text>')
    for index, line in enumerate(lines):
        svg.extend(_draw(line, index % COLOURS, place, smooth=smooth))
    svg.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>')
    legend = "".join(
        f'<span class="key"><i class="s{i % COLOURS}"></i>{escape(line.label)} '
        f"<b>{number(line.points[max(line.points)])}</b></span>"
        for i, line in enumerate(lines)
    )
    data = json.dumps({"x": xs, "lines": [[line.points.get(x) for x in xs] for line in lines]}, allow_nan=False)
    note = f'<p class="about">{escape(about)}</p>' if about else ""
    return (
        f'<figure class="chart" data-chart="{escape(data)}" data-left="{LEFT}" data-right="{WIDTH - RIGHT}">'
        f"<figcaption>{escape(title)}</figcaption>{note}<div class=legend>{legend}</div>{''.join(svg)}</figure>"
    )


def _draw(line: Line, colour: int, place, *, smooth: bool) -> list[str]:
    xs = sorted(line.points)
    if len(xs) == 1:
        x, y = place(xs[0], line.points[xs[0]])
        return [f'<circle class="s{colour}" cx="{x}" cy="{y}" r="3"/>']
    raw = [(x, line.points[x]) for x in xs]
    if len(xs) < SMOOTH_FROM or not smooth:
        return [_path(raw, f"line s{colour}", place)]
    average = list(zip(xs, moving_average([y for _, y in raw]), strict=True))
    return [_path(raw, f"line raw s{colour}", place), _path(average, f"line s{colour}", place)]


def _path(points: Sequence[tuple[int, float]], classes: str, place) -> str:
    text = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
    return f'<polyline class="{classes}" points="{text}"/>'


def moving_average(values: Sequence[float], radius: int | None = None) -> list[float]:
    """Centred mean over 2·radius + 1 values, with a smaller radius towards the ends, so that no end is bent."""
    reach = max(1, len(values) // 20) if radius is None else radius
    out = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        window = values[i - near : i + near + 1]
        out.append(sum(window) / len(window))
    return out


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values that enclose [low, high]; at least two."""
    if high - low < max(1e-12, 1e-9 * max(abs(low), abs(high))):
        pad = abs(high) * 0.1 if abs(high) > 1e-11 else 0.0
        low, high = (low - pad, high + pad) if pad else (min(low, 0.0), 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(i * step, digits) + 0.0 for i in range(first, last + 1)]


def _x_ticks(xs: Sequence[int]) -> list[int]:
    if len(xs) == 1:
        return [xs[0]]
    ticks = [int(t) for t in nice_ticks(xs[0], xs[-1], 5) if float(t).is_integer() and xs[0] <= t <= xs[-1]]
    return sorted(set(ticks)) or [xs[0], xs[-1]]


def number(value: float) -> str:
    """A value in a few characters: 0.42, 1.3k, 2e-05."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2g}"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.3g}" if size < 1e3 else f"{value:.0f}"
