"""A reward for a model that can do nothing yet: how much of what it wrote are letters."""

from __future__ import annotations

from inspan.trace.records import Rollout


def letters(rollout: Rollout) -> float | None:
    """The share of letters of the alphabet in all that the policy wrote; None when it wrote nothing."""
    text = "".join(str(node.message.get("content") or "") for node in rollout.nodes if node.sampled)
    return sum(char.isascii() and char.isalpha() for char in text) / len(text) if text else None
