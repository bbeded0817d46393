"""`invalid_calls`: fines tool calls that do not parse or do not fit their schema.

They are penalised, not repaired by constrained decoding, which breaks on-policy sampling (K2.5 report), and rollouts
with broken calls are kept, as negatives: throwing them away taught a model to break calls on purpose (Cursor).
"""

from __future__ import annotations

from inspan.errors import RecipeError
from inspan.trace.records import Rollout


class InvalidCalls:
    """-`penalty` for each invalid call of a trainable agent, down to -`cap`. The calls that reach the cap are fined."""

    process = True

    def __init__(self, penalty: float, cap: float) -> None:
        if penalty < 0 or cap < 0:
            raise RecipeError(
                f"penalty {penalty}, cap {cap}",
                where="invalid_calls",
                hint="both are amounts to take off: not negative",
            )
        self.penalty, self.cap = penalty, cap

    def __call__(self, rollout: Rollout) -> float:
        """The fine of a rollout, in [-cap, 0]."""
        return sum(self.turns(rollout).values(), 0.0)

    def turns(self, rollout: Rollout) -> dict[int, float]:
        """The fine of each call that made invalid tool calls."""
        trainable = {session.id for session in rollout.sessions if session.trainable}
        fines: dict[int, float] = {}
        room = self.cap
        for index, call in enumerate(rollout.calls):
            wrong = sum(tool_call.error is not None for tool_call in call.tool_calls)
            fine = min(self.penalty * wrong, room) if call.session in trainable else 0.0
            if fine > 0:
                fines[index] = -fine
                room -= fine
        return fines


def invalid_calls(*, penalty: float = 0.1, cap: float = 0.5) -> InvalidCalls:
    """A fine of `penalty` a call, at most `cap` a rollout [D: 0.1, 0.5]."""
    return InvalidCalls(penalty, cap)
