"""The fingerprint of a run: all that makes two results comparable. Contract: plain data; equal parts, equal id.

`setting` is known before anything runs (harness and its version, renderer, limits); `roles` is what the gateway saw the
harness show the model. A fingerprint is kept with every run, and its id with every rollout, evaluation and release.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from inspan.errors import InputError, ParityError
from inspan.parity.face import Face, canonical, entered, nearest

FILE: Final = "fingerprint.json"
HINT: Final = "use the training's settings and client, or add --allow-drift"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`setting` holds `harness`, `version` (a hash of the harness's source), `renderer` and `limits`."""

    setting: Mapping[str, Any]
    roles: Mapping[str, tuple[Face, ...]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """16 hex digits over all parts."""
        return hashlib.sha256(canonical(self.as_json()).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` takes."""
        roles = {role: [face.as_json() for face in faces] for role, faces in sorted(self.roles.items())}
        return {**self.setting, "roles": roles}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint of plain data; InputError when it is none."""
        try:
            setting = {name: data[name] for name in ("harness", "version", "renderer", "limits")}
            roles = {role: tuple(map(Face.from_json, faces)) for role, faces in data["roles"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"this is no fingerprint: {error!r}") from error
        return cls(setting, roles)

    def showing(self, role: str, face: Face) -> Fingerprint:
        """With one more request of a role taken in; itself when that is nothing new."""
        before = self.roles.get(role, ())
        after = entered(before, face)
        return self if after == before else replace(self, roles={**self.roles, role: after})

    def strange(self, role: str, face: Face) -> list[str]:
        """How a request differs from all that this role showed before; empty when it does not."""
        known = self.roles.get(role, ())
        if not known:
            return [f"role {role}: not seen in training, which had {', '.join(sorted(self.roles)) or 'no requests'}"]
        if any(one.takes(face) for one in known):
            return []
        return [f"role {role}: {told}" for told in nearest(known, face).told(face)]

    def differences(self, setting: Mapping[str, Any]) -> list[str]:
        """How another setting differs from this one's, in what is known of it; empty when it does not."""
        return list(_differences({name: self.setting[name] for name in setting}, setting))


def read(folder: Path) -> Fingerprint:
    """A run's fingerprint. ParityError when there is none, InputError when it cannot be read."""
    path = folder / FILE
    try:
        return Fingerprint.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ParityError("the run has no fingerprint, so it is not known what it was trained in", where=str(path),
                          hint="add --allow-drift to go on regardless") from None  # fmt: skip
    except (OSError, ValueError) as error:
        raise InputError(f"the fingerprint cannot be read: {error}", where=str(path)) from error


def refusal(differences: list[str], trained: Fingerprint) -> ParityError:
    """The error that says what differs."""
    lines = "\n".join(f"  {one}" for one in differences)
    return ParityError(f"the harness is not the one of the training (fingerprint {trained.id}):\n{lines}\n", hint=HINT)


def _differences(was: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*was, *now]):
            yield from _differences(was.get(name), now.get(name), f"{path}.{name}" if path else name)
    elif was != now:
        yield f"{path}: {_shown(was)} in training, {_shown(now)} now"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
