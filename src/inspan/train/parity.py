"""Parity: a policy is served and judged in the harness that it was trained in. Contract: another one is refused with
the difference told, unless it is asked for.

A run keeps `fingerprint.json`: what is known before it runs (prompt, tools, limits, renderer, version of the harness)
and, of harnesses that are not ours, what the gateway saw them tell their models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from inspan.errors import CheckpointError, InputError, RequestError
from inspan.rollout.fingerprint import Fingerprint, require_same
from inspan.rollout.load import BUILT_IN
from inspan.trace.parity import Harness, Told, told
from inspan.trace.records import Message, Rollout

FILE = "fingerprint.json"
ALLOW = "give --allow-drift to run it all the same"
_MOST = 64  # ways of speaking to a role; beyond it the harness has no fixed prompts, and the first are kept


class Kept:
    """The fingerprint of a training, as far as it is known by now."""

    def __init__(self, static: Fingerprint, seen: Harness | None = None) -> None:
        self.static = static
        self.seen = seen or Harness()
        self.foreign = static.harness not in BUILT_IN  # ours may tell a sub-agent what a model wrote

    def observe(self, rollout: Rollout) -> None:
        """Take in what a rollout's harness told."""
        if self.foreign and all(len(ways) < _MOST for ways in self.seen.roles.values()):
            self.seen.observe(rollout.sessions, rollout.nodes)

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        data = {"hash": self.static.hash, "parts": self.static.parts, "seen": self.seen.to_json()}
        partial = folder / (FILE + ".part")
        partial.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
        os.replace(partial, folder / FILE)

    def check(self, static: Fingerprint, *, what: str) -> None:
        """Raise `InputError` naming each difference of a harness before it runs."""
        try:
            require_same(self.static, static, what=what)
        except InputError as error:
            raise InputError(error.what, where=FILE, hint=ALLOW) from None

    def drift(self, role: str, one: Told) -> str | None:
        """How what a harness tells a role differs from what was seen in training; None when it does not."""
        return self.seen.difference(role, one) if self.foreign and self.seen.roles else None

    def drift_of(self, rollout: Rollout) -> str | None:
        """The first difference in a rollout."""
        roles = {session.id: session.agent for session in rollout.sessions}
        roots = [node for node in rollout.nodes if node.parent is None]
        found = (self.drift(roles[node.session], told(node.message)) for node in roots)
        return next((one for one in found if one is not None), None)


def load(folder: Path) -> Kept | None:
    """What a run kept; None of one that was made before there were fingerprints. Raises CheckpointError."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Kept(Fingerprint.from_parts(data["parts"]), Harness.from_json(data["seen"]))
    except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
        raise CheckpointError(f"the fingerprint cannot be read: {error}", where=str(path)) from error


def drifted(difference: str) -> InputError:
    """The error for a harness that differs."""
    return InputError(f"the harness is not the one of the training:\n{difference}", where=FILE, hint=ALLOW)


def gatekeeper(kept: Kept) -> Callable[[str, Message], None]:
    """For a gateway that serves: raises `RequestError` (409) for a conversation of another harness."""
    known: dict[tuple[str, str], str | None] = {}

    def check(role: str, root: Message) -> None:
        key = (role, json.dumps([root.get("content") if root["role"] == "system" else "", root.get("tools")]))
        if key not in known:
            if len(known) > 1000:
                known.clear()
            known[key] = kept.drift(role, told(root))
        if known[key] is not None:
            raise RequestError(f"the harness is not the one of the training:\n{known[key]}", status=409,
                               code="harness_drift")  # fmt: skip

    return check
