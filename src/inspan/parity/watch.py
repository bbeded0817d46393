"""Those who look at every kind of request: one learns what a training shows, one holds others to it. Contract: `see` is
called before a request is admitted, and raises `ParityError` when it is to be refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from inspan.errors import ParityError
from inspan.parity.face import Face
from inspan.parity.fingerprint import FILE, Fingerprint, refusal


class Watch(Protocol):
    """Looks at requests."""

    @property
    def id(self) -> str:
        """The id of the fingerprint as it is now."""
        ...

    def see(self, role: str, face: Face) -> None:
        """A role shows the model something. Raises `ParityError` to refuse it."""
        ...

    def demand(self) -> None:
        """Raise the first refusal, if there was one."""
        ...

    async def refused(self) -> None:
        """Return when something was refused."""
        ...


class Learning:
    """Takes in whatever comes: what the sessions of a training show is its fingerprint.

    `earlier` are the ids that it had when it was asked for them, the last one its own: rollouts carry them.
    """

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self.earlier: list[str] = []
        self._id: str | None = None

    @property
    def id(self) -> str:
        """The id of what was seen so far."""
        if self._id is None:
            self._id = self.fingerprint.id
            self.earlier = [*(one for one in self.earlier if one != self._id), self._id]
        return self._id

    def see(self, role: str, face: Face) -> None:
        """Take a request in."""
        seen = self.fingerprint.showing(role, face)
        if seen is not self.fingerprint:
            self.fingerprint, self._id = seen, None

    def demand(self) -> None:
        """Nothing is refused."""

    async def refused(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    def state(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"id": self.id, "earlier": self.earlier[:-1], **self.fingerprint.as_json()}

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from a `state()` under the setting that is here now; how the two settings differ."""
        before = Fingerprint.from_json(state)
        found = before.differences(self.fingerprint.setting)
        self.fingerprint, self._id = replace(self.fingerprint, roles=before.roles), None
        self.earlier = [*state["earlier"], state["id"]]
        return found


def save_fingerprint(shown: Learning, folder: Path) -> None:
    """Write a run's fingerprint, whole or not at all."""
    partial = folder / (FILE + ".part")
    partial.write_text(json.dumps(shown.state(), indent=1, ensure_ascii=False), encoding="utf-8")
    partial.replace(folder / FILE)


class Guard:
    """Refuses what a training did not show. Raises `ParityError` at once when the setting differs."""

    def __init__(self, trained: Fingerprint, setting: Mapping[str, Any]) -> None:
        self.trained = trained
        self._refused: ParityError | None = None
        self._heard = asyncio.Event()
        if found := trained.differences(setting):
            raise refusal(found, trained)

    @property
    def id(self) -> str:
        """The training's: what differs does not come through."""
        return self.trained.id

    def see(self, role: str, face: Face) -> None:
        """Raise `ParityError` for a request that differs, saying how."""
        if found := self.trained.strange(role, face):
            error = refusal(found, self.trained)
            self._refused = self._refused or error
            self._heard.set()
            raise error

    def demand(self) -> None:
        """Raise the first refusal."""
        if self._refused is not None:
            raise self._refused

    async def refused(self) -> None:
        """Return when something was refused."""
        await self._heard.wait()


class Drift(Learning):
    """Lets everything through, as was asked for, and keeps what differs from the training (`differences`)."""

    def __init__(self, trained: Fingerprint | None, setting: Mapping[str, Any]) -> None:
        super().__init__(Fingerprint({**(trained.setting if trained else {}), **setting}))
        self.differences = trained.differences(setting) if trained else ["the training's fingerprint is not known"]
        self._trained = trained

    def see(self, role: str, face: Face) -> None:
        """Take a request in."""
        super().see(role, face)
        if self._trained is not None:
            self.differences += [one for one in self._trained.strange(role, face) if one not in self.differences]
