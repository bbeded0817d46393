"""Where the rows of wide answers are lost: `python -m benchmarks.rows RUN`. Prints one JSON object.

Over the trained arm's held-out rollouts of a finished run: rows that the questions ask for (`wanted`), that sub-agents
returned (`returned`, of which right), and that stand in the final answers (`answered`, of which right).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from inspan.config import load
from inspan.trace.store import Stored, TraceStore
from inspan.train.environment import HELD_OUT, make_environment


def said(stored: Stored, session: str) -> set[str]:
    """The lines of a session's last message."""
    last = [node for node in stored.nodes if node.session == session][-1]
    return set((last.message.get("content") or "").splitlines())


def count(run: Path) -> dict[str, int]:
    """The counts, over all wide tasks."""
    tasks = {task.prompt: task for task in make_environment(load(run / "recipe.toml")).held_out[HELD_OUT]}
    store = TraceStore(run / "trace.sqlite", create=False)
    found = dict.fromkeys(("wanted", "returned", "returned_right", "answered", "answered_right"), 0)
    for entry in store.rollouts():
        if not entry.id.startswith(f"eval-trained-{HELD_OUT}-"):
            continue
        stored = store.load(entry.id)
        root = next(session.id for session in stored.sessions if session.parent is None)
        asked = next(n.message["content"] for n in stored.nodes if n.session == root and n.message["role"] == "user")
        task = tasks[asked]
        if task.kind != "wide" or not isinstance(task.answer, tuple):
            continue
        truth = {" | ".join(row) for row in task.answer}
        returned = set().union(*(said(stored, s.id) for s in stored.sessions if s.parent is not None))
        answered = said(stored, root)
        for name, rows in (("wanted", truth), ("returned", returned), ("answered", answered)):
            found[name] += len(rows)
        found["returned_right"] += len(returned & truth)
        found["answered_right"] += len(answered & truth)
    store.close()
    return found


if __name__ == "__main__":
    print(json.dumps(count(Path(sys.argv[1]))))
