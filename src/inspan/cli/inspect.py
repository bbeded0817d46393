"""`inspan inspect`: what was recorded of a run, how its conversations went on, and what became of every token."""

from __future__ import annotations

import json
from pathlib import Path

from inspan.cli.export import STORE
from inspan.cli.folders import RECIPE
from inspan.errors import InputError


def inspect(run: Path, *, rollout: str | None, as_json: bool) -> None:
    """Print the sums of a run's traces, or the tree of one rollout."""
    from inspan.trace.inspect import inspect as sums
    from inspan.trace.inspect import tree
    from inspan.trace.store import TraceStore

    path = run / STORE if run.is_dir() else run
    if not path.is_file():
        raise InputError("no trace store", where=str(path), hint="give the folder of a run that `inspan train` wrote")
    with TraceStore(path, create=False) as store:
        if rollout is not None:
            print("\n".join(tree(rollout, *store.load(rollout))))
            return
        found = {"renderer": _renderer(run), **sums(store, abandoned=_abandoned(run)).as_json()}
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))


def _abandoned(run: Path) -> bool:
    """Whether the run trains branches that the harness left."""
    if not (run / RECIPE).is_file():
        return True
    from inspan.config import load

    return load(run / RECIPE).train.abandoned


def _renderer(run: Path) -> str | None:
    """The renderer of a run, where it is known."""
    try:
        return str(json.loads((run / "fingerprint.json").read_text(encoding="utf-8"))["parts"]["renderer"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # made before there were fingerprints, or no run


def _lines(found: dict) -> list[str]:
    tokens, calls, tools = found["tokens"], found["calls"], found["tool_calls"]
    due = found["delivery"]
    ratio = tokens["processed"] / tokens["unique"] if tokens["unique"] else 0.0
    lines = [
        _row("rollouts", found["rollouts"]),
        _row("calls", calls),
        f"tokens     {tokens['sampled']:,} sampled; {tokens['processed']:,} processed, {tokens['unique']:,} unique "
        f"(×{ratio:.2f})",
        f"tool calls {tools['all']:,}, {sum(tools['invalid'].values()):,} invalid",
        *(f"             {count:,} × {error}" for error, count in sorted(tools["invalid"].items(), key=_most)[:5]),
        "how calls went on" + (f" (renderer {found['renderer']})" if found["renderer"] else ""),
    ]
    for role, rates in found["continued"].items():
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in rates.items() if name != "calls")
        lines.append(f"  {role}: {rates['calls']:,} calls: {shares}")
    lines.append(
        f"delivered  {100 * due['delivered_fraction']:.2f} %: {due['trained']:,} of {due['sampled']:,} sampled tokens"
    )
    lines += [f"             {count:,} excluded: {reason}" for reason, count in due["excluded_tokens"].items()]
    lines.append(f"unexplained {due['unexplained_tokens']:,}")
    return lines


def _row(name: str, counts: dict[str, int]) -> str:
    parts = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items())
    return f"{name:<10} {sum(counts.values()):,}" + (f": {parts}" if parts else "")


def _most(item: tuple[str, int]) -> int:
    return -item[1]
