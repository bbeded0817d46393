"""Runs every benchmark, one after the other: `python -m benchmarks`. One JSON object a row; what is missing is said.

Each runs in a process of its own, so that none inherits another's threads, caches or memory.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "engine_decode.py": (),
    "gateway.py": (),
    "gateway_streams.py": (),
    "episodes.py": (),
    "learner.py": (),
    "vs_trl.py": ("trl",),
}
"""Scripts, and the packages beyond Inspan's own that each needs."""


def main() -> int:
    """Run all; returns how many failed."""
    failed = 0
    for name, needs in BENCHMARKS.items():
        missing = [package for package in needs if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{name}: skipped, pip install {' '.join(missing)}", file=sys.stderr)
            continue
        failed += subprocess.run([sys.executable, str(HERE / name)], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
