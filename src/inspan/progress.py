"""What a run tells while it runs. Contract: whoever listens never changes or stops the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Progress(Protocol):
    """What a run tells while it runs. Calls come from one thread, `start` first and `finish` last."""

    def start(self, recipe: Any, total: int, done: int = 0) -> None:
        """A run of `total` updates begins; `done` of them were made before (a resumed run)."""
        ...

    def phase(self, name: str) -> None:
        """What it does now: "rollouts", "learning", "evaluating trained"..."""
        ...

    def update(self, metrics: Mapping[str, Any]) -> None:
        """An update is finished and its metrics are written."""
        ...

    def finish(self, summary: Any = None) -> None:
        """The run is over (also when it was stopped: then without a summary)."""
        ...
