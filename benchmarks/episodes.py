"""Multi-turn episodes per second: the shipped tiny model answers questions with search and read tools over a library.

    python benchmarks/episodes.py [--threads 2]

prints one JSON object a row, in about a minute on a quiet machine. *End to end* is what a run does: dispatcher,
harness, the ordinary client, gateway, engine, and a store on disk. *Engine* plays the same episodes on the engine
alone. Their peer is the shape of batch trainers (TRL's tool loop): all episodes take a turn together, each turn's whole
conversation is prefilled anew by `transformers.generate` with left padding, then all tools run at once, and the round
waits for the slowest. Beside it stands the same lock-step on our engine without its prefix cache: the scheduling alone.

Tools answer at once, or after a log-normal time (mean 50 ms, σ 1), slept for on all sides and drawn from the same
seeds. Model, tasks, sampling and limits are one; `turns` and `sampled` (tokens), means of an episode, should agree.
`cpu_ratio` compares the CPU time of an episode, which a busy machine disturbs less. The shares are the CPU time of the
gateway over the time on the clock and over all CPU time, and that of harness, client and tools over all CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import coroutine
from typing import Any

import inspan  # noqa: F401 (before torch: it sets how OpenMP threads wait)

# isort: split
import torch

from episode_play import SAMPLES, Bench, Turn, free_running, lock_step, make_episodes, on_engine, on_generate
from inspan.gateway.base import Role
from inspan.rollout.dispatcher import run_tasks
from inspan.rollout.executor import LocalExecutor
from inspan.trace.records import Terminal
from inspan.trace.store import TraceStore
from inspan.train.setup import POLICY, Stack


@dataclass
class Played:
    """What a side did: seconds on the clock and of CPU; turns and sampled tokens by episode; shares of the time."""

    seconds: float
    cpu: float
    turns: list[int]
    sampled: list[int]
    shares: dict[str, float] = field(default_factory=dict)


async def alone(bench: Bench, play: Callable[..., Awaitable[None]], make_turn: Callable[[Stack], Turn]) -> Played:
    """Play the episodes without harness and gateway."""
    stack = bench.stack()
    try:
        turn = make_turn(stack)
        torch.set_num_threads(bench.threads)
        await play(make_episodes(bench, stack, bench.warm_up, 1), turn)
        episodes = make_episodes(bench, stack, bench.tasks, SAMPLES)
        begin, cpu = time.perf_counter(), time.process_time()
        await play(episodes, turn)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    finally:
        await stack.close()
    return Played(seconds, cpu, [episode.turns for episode in episodes], [episode.sampled for episode in episodes])


class Meter:
    """Adds up the CPU time that coroutines of one kind take between their suspensions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The function, metered."""

        @coroutine
        def metered(*args: Any) -> Generator[Any, Any, Any]:
            steps = function(*args).__await__()
            advance, given = steps.send, None
            while True:
                begin = time.thread_time()
                try:
                    waits = advance(given)
                except StopIteration as end:
                    return end.value
                finally:
                    self.seconds += time.thread_time() - begin
                try:
                    advance, given = steps.send, (yield waits)
                except BaseException as error:
                    advance, given = steps.throw, error

        return metered


async def end_to_end(bench: Bench) -> Played:
    """Play the episodes as a run does, on a store on disk."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        stack = bench.stack(TraceStore(Path(folder) / "trace.sqlite"))
        runner = stack.runner("single", [Role("main", POLICY, True)])
        runner.make_tools = bench.make_tools
        gateway, harness = Meter(), Meter()
        stack.gateway.app = gateway(stack.gateway.app)  # type: ignore[assignment]
        runner.harness = replace(runner.harness, run=harness(runner.harness.run))
        home = LocalExecutor(runner)
        count = len(bench.tasks) * SAMPLES
        try:
            await run_tasks(home, bench.warm_up, prefix="warm-", store=stack.store)
            gateway.seconds = harness.seconds = 0.0
            begin, cpu = time.perf_counter(), time.process_time()
            groups = await run_tasks(home, bench.tasks, samples=SAMPLES, concurrency=count, store=stack.store)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        finally:
            await home.close()
            await stack.close()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if lost := [rollout.error for rollout in rollouts if rollout.terminal is Terminal.INFRASTRUCTURE]:
        raise SystemExit(f"{len(lost)} episodes were lost; the first: {lost[0]}")
    return Played(
        seconds,
        cpu,
        [sum(call.node is not None for call in rollout.calls) for rollout in rollouts],
        [int(rollout.metrics["sampled_tokens"]) for rollout in rollouts],
        {
            "gateway_share": gateway.seconds / seconds,
            "gateway_cpu_share": gateway.seconds / cpu,
            "harness_and_client_cpu_share": (harness.seconds - gateway.seconds) / cpu,
        },
    )


# ---- rows -------------------------------------------------------------------------------------------------------


def show(what: str, ours: Played, peer: Played, target: str = "") -> None:
    """Print a row."""
    rates = [len(side.turns) / side.seconds for side in (ours, peer)]
    row: dict[str, Any] = {
        "what": what, "ours": round(rates[0], 2), "peer": round(rates[1], 2), "ratio": round(rates[0] / rates[1], 3),
        "unit": "episodes/s",
    }  # fmt: skip
    row["cpu_ratio"] = round(peer.cpu / ours.cpu * len(ours.turns) / len(peer.turns), 3)
    if target:
        row["target"] = target
    for name in ("turns", "sampled"):
        row[name] = [round(statistics.mean(getattr(side, name)), 2) for side in (ours, peer)]
    row |= {name: round(share, 3) for name, share in ours.shares.items()}
    print(json.dumps(row, ensure_ascii=False), flush=True)


async def main(threads: int, tasks: int) -> None:
    """Play all sides with instant tools, then with slow ones."""
    bench = Bench(threads, tasks)
    for slow in (False, True):
        bench.slow = slow
        tools = "log-normal tools" if slow else "instant tools"
        where = f"{tools}, {tasks * SAMPLES} episodes, {threads} thread(s)"
        peer = await alone(bench, lock_step, on_generate)
        whole = await end_to_end(bench)
        engine = await alone(bench, free_running, lambda stack: on_engine(stack, reuse=True))
        lock = await alone(bench, lock_step, lambda stack: on_engine(stack, reuse=False))
        show(f"end to end against lock-step generate: {where}", whole, peer, ">= 2" if slow else ">= 1.2")
        show(f"engine against lock-step generate: {where}", engine, peer, "" if slow else ">= 1.4")
        show(f"engine against lock-step on the same engine: {where}", engine, lock)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Multi-turn episodes per second against a lock-step loop.")
    parser.add_argument("--threads", type=int, default=1, help="threads of each side")
    parser.add_argument("--tasks", type=int, default=4, help=f"tasks, {SAMPLES} episodes each")
    options = parser.parse_args()
    asyncio.run(main(options.threads, options.tasks))
