"""What this machine could do at best (matrix-product GFLOP/s, memory bandwidth), and what a decode step needs.

    python benchmarks/roofline.py [threads]

prints one JSON object a row. A decode step's *floor* is the larger of its arithmetic at the measured GFLOP/s and its
memory traffic (weights once, every active sequence's keys and values once) at the measured bandwidth.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import inspan  # noqa: F401 (before torch: it sets how OpenMP threads wait)

# isort: split
import torch

from inspan.engine.weights import ModelSpec


def best_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The fastest of several runs: what the machine does when its neighbours leave it alone."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def gemm_gflops(size: int = 1024) -> float:
    """float32 matrix product, GFLOP/s, at torch's present thread count."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / best_seconds(lambda: a @ b) / 1e9


def read_bandwidth(megabytes: int = 256) -> float:
    """Sequential read of a float32 tensor larger than the caches, GB/s."""
    data = torch.ones(megabytes * (1 << 20) // 4)
    return data.numel() * 4 / best_seconds(data.sum) / 1e9


def decode_floor(spec: ModelSpec, batch: int, context: int, gflops: float, bandwidth: float) -> float:
    """Seconds that a decode step of `batch` sequences of `context` tokens takes at best (float32)."""
    attention = 4 * spec.layers * spec.heads * spec.head_dim * context
    flops = batch * (2 * (spec.parameters - (0 if spec.tied else spec.vocab * spec.hidden)) + attention)
    traffic = 4 * spec.parameters + batch * context * spec.kv_bytes
    return max(flops / gflops / 1e9, traffic / bandwidth / 1e9)


def main() -> None:
    """Print the two roofs."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    threads = torch.get_num_threads()
    for what, value, unit in (
        ("float32 matrix product, 1024³", gemm_gflops(), "GFLOP/s"),
        ("sequential read", read_bandwidth(), "GB/s"),
    ):
        row = {
            "what": f"{what}, {threads} thread(s)",
            "ours": round(value, 1),
            "peer": None,
            "ratio": None,
            "unit": unit,
        }
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
