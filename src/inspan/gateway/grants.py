"""Grants at rest. Contract: of a key only its hash is kept, and the hash alone cannot be used.

Keys are 192 random bits, so a plain SHA-256 is as good as a slow hash: there is nothing to guess. What a grant allows
is kept beside it, so that a gateway that was killed takes the rollout up again when its key comes next.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from inspan.engine.base import SamplingParams
from inspan.errors import InputError
from inspan.gateway.base import Limits, Role
from inspan.gateway.pace import Pace


@dataclass(frozen=True, slots=True)
class Terms:
    """What a grant allows: the roles that its rollout may speak for, and under which limits."""

    roles: Sequence[Role]
    limits: Limits
    seed: int
    sampling: SamplingParams | None
    default_role: str
    pace: Pace

    def to_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` takes."""
        return {
            "roles": [
                {
                    "name": role.name,
                    "policy": role.policy,
                    "trainable": role.trainable,
                    "model": role.model.pattern if role.model else None,
                    "system": role.system.pattern if role.system else None,
                }
                for role in self.roles
            ],
            "limits": asdict(self.limits),
            "seed": self.seed,
            "sampling": None if self.sampling is None else asdict(self.sampling),
            "default_role": self.default_role,
            "pace": asdict(self.pace),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Terms:
        """Terms of plain data; what is left out is as by default. Raises `InputError` naming what is wrong."""
        if unknown := sorted(set(data) - {"roles", "limits", "seed", "sampling", "default_role", "pace"}):
            raise InputError(f"unknown key {unknown[0]!r}", where="grant")
        roles = data.get("roles")
        if not isinstance(roles, list) or not roles:
            raise InputError("roles is a list of at least one role", where="roles",
                             hint='[{"name": "main", "policy": "policy", "trainable": true}]')  # fmt: skip
        made = [_role(role) for role in roles]
        sampling = data.get("sampling")
        if isinstance(sampling, Mapping):
            sampling = {**sampling, "stop_ids": tuple(sampling.get("stop_ids", ()))}
        return cls(
            made,
            _made(Limits, data.get("limits"), "limits"),
            _whole(data.get("seed", 0), "seed"),
            None if sampling is None else _made(SamplingParams, sampling, "sampling"),
            str(data.get("default_role") or made[0].name),
            _made(Pace, data.get("pace"), "pace"),
        )


def new_key() -> str:
    """An unguessable key, fit for a URL."""
    return secrets.token_urlsafe(24)


def key_hash(key: str) -> bytes:
    """What is kept of a key. Keys are looked up by it, so the time that a look-up takes tells nothing about them."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _role(data: Any) -> Role:
    try:
        rules = {name: re.compile(data[name]) for name in ("model", "system") if data.get(name)}
        role = Role(data["name"], data["policy"], data.get("trainable", False), **rules)
    except (KeyError, TypeError, AttributeError, re.error) as error:
        raise InputError(f"{data!r:.100} is no role: {error}", where="roles") from None
    if not (isinstance(role.name, str) and role.name and isinstance(role.policy, str) and role.policy):
        raise InputError("a role has a name and a policy", where="roles")
    if not isinstance(role.trainable, bool):
        raise InputError(f"trainable is true or false, not {role.trainable!r}", where=f"role {role.name!r}")
    return role


def _made(kind: Any, data: Any, where: str) -> Any:
    if data is None:
        data = {}
    try:
        return kind(**data)
    except TypeError as error:
        raise InputError(f"{where}: {error}", where=where) from None


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{value!r} is no whole number from 0", where=where)
    return value
