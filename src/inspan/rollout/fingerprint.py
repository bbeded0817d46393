"""Parity: a policy is served and judged in the harness it was trained in. Contract: equal parts, equal hash.

A fingerprint is stored with every rollout, benchmark result and release; serving or gating under another one than the
training's is refused unless asked for (`require_same`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspan.errors import InputError


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What makes two runs comparable. `limits` are those of an episode; `version` is a hash of the harness's source."""

    system_prompt: str
    tools: tuple[str, ...]  # canonical JSON of each tool schema, in the order offered
    limits: Mapping[str, int | None]
    renderer: str
    harness: str
    version: str

    @property
    def parts(self) -> dict[str, Any]:
        """The parts as plain JSON, for people to read and for `from_parts`."""
        return {
            "system_prompt": self.system_prompt,
            "tools": [json.loads(tool) for tool in self.tools],
            "limits": dict(self.limits),
            "renderer": self.renderer,
            "harness": self.harness,
            "version": self.version,
        }

    @property
    def hash(self) -> str:
        """16 hex digits over the parts."""
        return hashlib.sha256(_canonical(self.parts).encode()).hexdigest()[:16]

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint whose `parts` these are; InputError when they are not such parts."""
        try:
            tools = tuple(_canonical(tool) for tool in parts["tools"])
            rest = {name: parts[name] for name in ("system_prompt", "limits", "renderer", "harness", "version")}
        except (KeyError, TypeError) as error:
            raise InputError(f"this is no fingerprint: {error}") from error
        return cls(tools=tools, **rest)

    def differences(self, other: Fingerprint) -> list[str]:
        """One line for each part that differs."""
        mine, others = self.parts, other.parts
        differing = [name for name in mine if mine[name] != others[name]]
        return [f"{name}: {_short(mine[name])} against {_short(others[name])}" for name in differing]


def fingerprint(
    *,
    harness: str,
    version: str,
    renderer: str,
    limits: Mapping[str, int | None],
    system_prompt: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> Fingerprint:
    """The fingerprint of a setting. The order of keys in schemas and limits does not matter, that of the tools does."""
    return Fingerprint(system_prompt, tuple(map(_canonical, tools)), dict(limits), renderer, harness, version)


def require_same(expected: Fingerprint, actual: Fingerprint, *, what: str) -> None:
    """Raise InputError, naming each difference, unless the two are equal. `what` says who is refused."""
    found = expected.differences(actual)
    if found:
        raise InputError(
            f"{what} differs from the training's harness in {'; '.join(found)}",
            hint="use the training's settings, or ask for the mismatch explicitly",
        )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _short(value: Any, width: int = 60) -> str:
    text = value if isinstance(value, str) else _canonical(value)
    return repr(text if len(text) <= width else text[: width - 1] + "…")
