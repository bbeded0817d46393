"""The failure zoo of the swarm: each faulty recipe beside its cure: `make zoo` (half an hour).

Every run is an ordinary `inspan train` into runs/zoo/<name>; what is there already is not run again. Prints one JSON
object a run: what the detectors found in its updates, and the figures of its last third.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from benchmarks.runs import Run, train_all

SWARM = "recipes/swarm.toml"
TINY, ENTROPY = "recipes/zoo/swarm-tiny-differences.toml", "recipes/zoo/swarm-entropy-collapse.toml"
ZOO: dict[str, tuple[str, tuple[str, ...]]] = {
    "serial-collapse": ("recipes/zoo/swarm-serial-collapse.toml", ()),
    "serial-cured": (SWARM, ()),
    "spurious-parallelism": ("recipes/zoo/swarm-spurious-parallelism.toml", ()),
    "spawn-farming": ("recipes/zoo/swarm-spawn-farming.toml", ()),
    "wasteful-cured": (SWARM, ("model='tiny-wasteful'",)),
    "tiny-differences": (TINY, ()),
    "tiny-cured": (TINY, ("train.credit='group_mean'",)),
    "entropy-collapse": (ENTROPY, ()),
    "entropy-cured": (ENTROPY, ("train.objective='cispo'",)),
}
"""Recipe and settings of each run. A `…-cured` run is the remedy of the faulty ones before it, on the same base."""
FIGURES = (
    "item_f1", "parallel_width", "spawned", "spawn_rate", "wide_parallel_rate", "narrow_multi_spawn", "finish_rate",
    "repeat_rate", "tiny_share", "entropy",
)  # fmt: skip


def row(name: str, seed: int, out: Path) -> dict[str, object]:
    """What a run showed."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = lines[-(len(lines) // 3) :]
    rows = [line["behaviour"] for line in last]
    figures = {f: round(fmean(r[f] for r in rows), 4) for f in FIGURES if all(f in r for r in rows)}
    found = json.loads((out / "summary.json").read_text(encoding="utf-8"))["findings"]
    return {"what": "zoo", "run": name, "seed": seed, "found": [one["name"] for one in found], **figures}


def _run(name: str, seed: int, folder: Path) -> Run:
    recipe, settings = ZOO[name]
    return Run(recipe, folder / f"{name}-{seed}", seed, (*settings, "eval.tasks=16"))


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the zoo and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", nargs="+", choices=ZOO, default=list(ZOO))
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    options = parser.parse_args(arguments)
    made = {name: _run(name, options.seed, options.out) for name in options.runs}
    for name, out in train_all(made, options.jobs).items():
        print(json.dumps(row(name, options.seed, out)), flush=True)


if __name__ == "__main__":
    main()
