"""Where rollouts run. Contract: `submit` returns exactly one `Rollout` per job, whatever the harness does.

An executor never raises for a harness's fault: how a rollout ended is in its terminal state. `cancel` ends a job early;
its rollout still comes, with `Terminal.CANCELLED`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from inspan.rollout.run import RolloutJob, Runner
from inspan.trace.records import Rollout

__all__ = ["Executor", "LocalExecutor", "RolloutJob"]


class Executor(Protocol):
    """Runs rollouts somewhere."""

    def submit(self, job: RolloutJob, started: Callable[[], None] | None = None) -> Awaitable[Rollout]:
        """Run one job; `started` is called when it leaves the executor's own queue and begins to run."""
        ...

    def cancel(self, job: str) -> None:
        """End a job early by its id; does nothing when it has ended or is unknown."""
        ...

    async def close(self) -> None:
        """Cancel what runs and free what was opened."""
        ...


class LocalExecutor:
    """Rollouts as tasks of the running event loop. The runner decides what runs on the loop and what in threads."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._cancels: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[Rollout]] = set()

    def submit(self, job: RolloutJob, started: Callable[[], None] | None = None) -> asyncio.Task[Rollout]:
        """Start the job now; the task's result is its rollout."""
        if job.id in self._cancels:
            raise ValueError(f"job {job.id} is running already")
        self._cancels[job.id] = cancel = asyncio.Event()
        task = asyncio.create_task(self.runner.run(job, cancel=cancel, started=started), name=f"rollout {job.id}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._forget(job.id, done))
        return task

    def _forget(self, job: str, task: asyncio.Task[Rollout]) -> None:
        self._cancels.pop(job, None)
        self._tasks.discard(task)

    def cancel(self, job: str) -> None:
        """End a job early; its task still ends with a rollout, in state CANCELLED."""
        event = self._cancels.get(job)
        if event is not None:
            event.set()

    async def close(self) -> None:
        """Cancel all jobs, wait for their rollouts, and close the runner's clients and loopback server."""
        for event in self._cancels.values():
            event.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self.runner.close()
