"""What one kind of request shows the model: its system prompt, tools, sampling fields, dialect and client. Contract:
pure; a face fits those it was widened from, and `told` names every part in which two differ.

An agent may have several faces in one role: its turns, and the titles and summaries that it asks for on the side.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from inspan.errors import InputError
from inspan.parity.mask import mask
from inspan.parity.template import HOLE, fits, widened

UNSET: Final = "unset"  # the value of a sampling field that a request leaves out
KEPT: Final = 0.5  # prompts that share fewer of their words are two kinds of request
MOST_VALUES: Final = 8  # of a sampling field; more, and it is volatile
MOST_PROMPTS: Final = 8  # kinds of requests that differ in nothing but the prompt; more, and all of it is volatile


@dataclass(frozen=True, slots=True)
class Face:
    """One kind of request. `system` is a template; `tools` are canonical JSON in the order of their names; `sampling`
    has the values that were seen of each field, as JSON."""

    dialect: str
    client: str
    system: str
    tools: tuple[str, ...] = ()
    sampling: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        dialect: str,
        client: str,
        system: str,
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
    ) -> Face:
        """The face of one request, with what is volatile by its form masked."""
        schemas = sorted((canonical(_masked(tool)) for tool in tools), key=lambda tool: (tool_name(tool), tool))
        values = {name: (canonical(_masked(value)),) for name, value in sorted(sampling.items())}
        return cls(dialect, client, mask(system), tuple(schemas), values)

    def kind(self) -> tuple[Any, ...]:
        """What two faces must have alike for their prompts to be compared."""
        return self.dialect, self.client, self.tools

    def takes(self, other: Face) -> bool:
        """Whether another face is of this kind and fits it."""
        return self.kind() == other.kind() and fits(self.system, other.system) and not self._strange(other)

    def distance(self, other: Face) -> tuple[int, float]:
        """How far another face is: parts that differ, then words of the prompt that are not shared."""
        parts = [self.dialect != other.dialect, self.client != other.client, self.tools != other.tools]
        return sum([*parts, bool(self._strange(other))]), 1.0 - widened(self.system, other.system)[1]

    def told(self, other: Face) -> Iterator[str]:
        """What differs in another face, a part at a time: a name, and after a colon what was and what is."""
        for name in ("dialect", "client"):
            if (was := getattr(self, name)) != (now := getattr(other, name)):
                yield f"{name}: {was or 'none'} in training, {now or 'none'} now"
        if not fits(self.system, other.system):
            yield "system prompt changed:\n" + _diff(self.system, _as_known(self.system, other.system))
        yield from _tools_told(self.tools, other.tools)
        for name in self._strange(other):
            was, now = self.sampling.get(name, (UNSET,)), other.sampling.get(name, (UNSET,))
            yield f"sampling.{name}: {' or '.join(was)} in training, {' or '.join(now)} now"

    def _strange(self, other: Face) -> list[str]:
        """Sampling fields that have a value which this face has not."""
        names = dict.fromkeys([*self.sampling, *other.sampling])
        return [name for name in names if not _covers(self.sampling.get(name), other.sampling.get(name))]

    def as_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` takes."""
        return {
            "dialect": self.dialect,
            "client": self.client,
            "system": self.system,
            "tools": [json.loads(tool) for tool in self.tools],
            "sampling": {name: list(values) for name, values in sorted(self.sampling.items())},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Face:
        """The face of plain data; InputError when it is none."""
        try:
            tools = tuple(canonical(tool) for tool in data["tools"])
            sampling = {name: tuple(values) for name, values in data["sampling"].items()}
            return cls(data["dialect"], data["client"], data["system"], tools, sampling)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"this is no face of a harness: {error!r}") from error


def entered(faces: Sequence[Face], new: Face) -> tuple[Face, ...]:
    """The faces of a role with one more request taken in.

    Prompts that share most of their words become one, with holes where they differ; when there come to be too many of
    one kind, they are taken to have no more in common than what all of them share.
    """
    if any(face.takes(new) for face in faces):
        return tuple(faces)
    alike = [(at, *widened(face.system, new.system)) for at, face in enumerate(faces) if face.kind() == new.kind()]
    at, system, kept = max(alike, key=lambda found: found[2], default=(-1, "", 0.0))
    if alike and kept >= KEPT:
        joined = replace(faces[at], system=system, sampling=_joined(faces[at].sampling, new.sampling))
        return (*faces[:at], joined, *faces[at + 1 :])
    if len(alike) < MOST_PROMPTS:
        return (*faces, new)
    one = new
    for at, _, _ in alike:
        old = faces[at]
        one = replace(one, system=widened(old.system, one.system)[0], sampling=_joined(old.sampling, one.sampling))
    taken = {at for at, _, _ in alike}
    return (*(face for at, face in enumerate(faces) if at not in taken), one)


def nearest(faces: Sequence[Face], face: Face) -> Face:
    """The face that differs least from another; `faces` is not empty."""
    return min(faces, key=lambda known: known.distance(face))


def canonical(value: Any) -> str:
    """JSON that does not depend on the order of keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def tool_name(tool: str) -> str:
    """The name of a tool's schema."""
    data = json.loads(tool)
    return str(data.get("function", data).get("name", ""))


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: _masked(item) for key, item in value.items()}
    return [_masked(item) for item in value] if isinstance(value, list | tuple) else value


def _covers(seen: tuple[str, ...] | None, values: tuple[str, ...] | None) -> bool:
    known = seen or (UNSET,)
    return HOLE in known or set(values or (UNSET,)) <= set(known)


def _joined(one: Mapping[str, tuple[str, ...]], other: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    made = {}
    for name in sorted({*one, *other}):
        values = sorted({*one.get(name, (UNSET,)), *other.get(name, (UNSET,))})
        made[name] = (HOLE,) if HOLE in values or len(values) > MOST_VALUES else tuple(values)
    return made


def _tools_told(was: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    old, new = ({tool_name(tool): tool for tool in tools} for tools in (was, now))
    if added := [name for name in new if name not in old]:
        yield f"tools added: {', '.join(added)}"
    if removed := [name for name in old if name not in new]:
        yield f"tools removed: {', '.join(removed)}"
    for name in old:
        if name in new and old[name] != new[name]:
            yield f"tool {name} changed:\n" + _diff(_pretty(old[name]), _pretty(new[name]))


def _pretty(tool: str) -> str:
    return json.dumps(json.loads(tool), indent=1, sort_keys=True, ensure_ascii=False)


def _as_known(template: str, text: str) -> str:
    """A text in which lines that fit a line of the template are written like it, so that a diff leaves them out."""
    known = [line for line in template.splitlines() if HOLE in line and line.strip() != HOLE]
    return "\n".join(next((k for k in known if fits(k, line)), line) for line in text.splitlines())


def _diff(was: str, now: str) -> str:
    lines = difflib.unified_diff(was.splitlines(), now.splitlines(), "training", "now", lineterm="", n=1)
    return "\n".join(f"    {line}" for line in lines)
