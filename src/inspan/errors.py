"""One small error tree.

Every error that reaches a user says *what* went wrong, *where*, and *what to do*. Two questions decide the class:
is it the user's input (`InputError` and below: exit code 2, no traceback), and is it the infrastructure
(`InfrastructureError`: the rollout has no reward, `None`, and may be retried)?
"""

from __future__ import annotations


class InspanError(Exception):
    """Base of every error that Inspan raises on purpose.

    `what` names the fault, `where` the place (file, key, session), `hint` the remedy.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        parts = [what if where is None else f"{where}: {what}"]
        if hint:
            parts.append(f"({hint})")
        super().__init__(" ".join(parts))


class InputError(InspanError):
    """The user's input is at fault; shown without a traceback."""


class RecipeError(InputError):
    """A recipe has an unknown key, a wrong type or an impossible combination."""


class TaskError(InputError):
    """A task or task file cannot be used (missing answer, empty set, bad JSON)."""


class CorpusError(InputError):
    """A corpus document cannot be read (not UTF-8, duplicate id, empty corpus)."""


class ModelError(InputError):
    """A model or tokenizer cannot be used (missing files, no chat template, unknown architecture)."""


class StoreError(InspanError):
    """The trace store or a run directory cannot be read or written (corrupt, full disk, locked)."""


class CheckpointError(InspanError):
    """A checkpoint is incomplete, corrupt or belongs to another recipe."""


class ParityError(InputError):
    """A policy is about to be served or judged in another harness than it was trained in; says what differs."""


class InvariantBroken(InspanError):
    """A record, or what is made of it, is not what it must be: a fault of Inspan's own, found by `--verify`."""


class LimitExceeded(InspanError):
    """A budget (critical steps, tokens, calls) is used up; raised to the harness, scored as an ordinary end."""


class InfrastructureError(InspanError):
    """Engine, gateway or sandbox failed; the rollout gets no reward (`None`), which is not 0."""


class EngineError(InfrastructureError):
    """The engine could not serve a request (queue full, crashed, weights incomplete)."""


class EngineOverloaded(EngineError):
    """The engine's bounded queue is full; try again later (HTTP 429 at the gateway)."""


class SandboxError(InfrastructureError):
    """A sandbox could not be started, or died under a command."""


class RequestError(InputError):
    """A model request is malformed or not allowed; the gateway answers with the dialect's own error shape.

    `retry_after` is in seconds.
    """

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(what, where=param)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after
