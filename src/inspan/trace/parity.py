"""What a harness told its models, with what changes from run to run masked. Contract: pure; equal harnesses look equal.

A program of others is known by what it sends: per role its system prompts and its tools. Dates, times, ids, paths of
temporary folders, ports and long numbers are masked by their form; whatever else differs between rollouts of one
training is masked by comparing them. What is left is the harness: when it differs, so does what the policy was trained
on.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspan.trace.records import Message, Node, Session

MASK = "…"
_ALIKE = 0.6  # from this share of equal words on, two prompts are one prompt with volatile parts [D]
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_VOLATILE = re.compile(
    "|".join(
        (
            r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",  # UUID
            r"(?:/private)?/(?:tmp|var/folders|var/tmp)/[^\s\"'`<>)\]]+",  # temporary folders
            r"https?://(?:127\.0\.0\.1|localhost|\[::1\])(?::\d+)?[^\s\"'`<>)\]]*",
            r"\d{4}-\d\d?-\d\d?(?:[T ]\d\d?:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?",  # ISO date and time
            rf"(?:{_DAY},? )?(?:{_MONTH} \d\d?|\d\d? {_MONTH})(?:,? \d{{4}})?",  # Tue Dec 01 2026, 1 December 2026
            rf"\b{_DAY}\b(?=[,.]? *(?:{MASK}|\d))",
            r"\d\d?[/.]\d\d?[/.]\d{2,4}",
            r"\d\d?:\d\d(?::\d\d)?(?: ?[AaPp]\.?[Mm]\.?)?",
            r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b",  # a hash
            r"\b\d{5,}\b",
        )
    )
)


@dataclass(frozen=True, slots=True)
class Told:
    """One way in which a role is spoken to: its masked system prompt, and its tools as canonical JSON, by name."""

    system: str
    tools: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"system": self.system, "tools": [json.loads(tool) for tool in self.tools]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Told:
        """What `to_json` gave."""
        return cls(str(data["system"]), tuple(_canonical(tool) for tool in data["tools"]))


def told(root: Message) -> Told:
    """What a conversation's first message tells."""
    system = str(root.get("content") or "") if root.get("role") == "system" else ""
    tools = sorted(masked(_canonical(_schema(tool))) for tool in root.get("tools") or ())
    return Told(masked(system), tuple(tools))


def masked(text: str) -> str:
    """A text with its volatile parts masked by their form."""
    while (found := _VOLATILE.sub(MASK, text)) != text:  # a mask may complete another form
        text = found
    return text


@dataclass(slots=True)
class Harness:
    """All that a harness was seen to tell: per role, the ways in which it speaks to it."""

    roles: dict[str, list[Told]] = field(default_factory=dict)

    def see(self, role: str, one: Told) -> None:
        """Take in one more conversation; what differs from one that is alike is masked in it."""
        known = self.roles.setdefault(role, [])
        for at, other in enumerate(known):
            if one.tools == other.tools and alike(one.system, other.system):
                known[at] = Told(common(other.system, one.system), one.tools)
                return
        known.append(one)

    def observe(self, sessions: Sequence[Session], nodes: Iterable[Node]) -> None:
        """Take in all conversations of a rollout."""
        roles = {session.id: session.agent for session in sessions}
        for node in nodes:
            if node.parent is None:
                self.see(roles[node.session], told(node.message))

    def difference(self, role: str, one: Told) -> str | None:
        """How a conversation differs from all that was seen of its role; None when it does not."""
        known = self.roles.get(role)
        if known is None:
            return f"role {role!r} was not seen in training (only {', '.join(map(repr, self.roles)) or 'none'})"
        for other in known:
            if one.tools == other.tools and fits(other.system, one.system):
                return None
        nearest = max(
            known, key=lambda other: (len(set(one.tools) & set(other.tools)), _ratio(one.system, other.system))
        )
        return "\n".join(_explain(role, nearest, one))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {role: [one.to_json() for one in ways] for role, ways in sorted(self.roles.items())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Harness:
        """What `to_json` gave."""
        return cls({role: [Told.from_json(one) for one in ways] for role, ways in data.items()})


def alike(one: str, other: str) -> bool:
    """Whether two prompts are the same but for some parts."""
    return one == other or _ratio(one, other) >= _ALIKE


def common(one: str, other: str) -> str:
    """What two prompts share; runs of words that differ are masked."""
    if one == other:
        return one
    parts: list[str] = []
    mine, its = one.splitlines(keepends=True), other.splitlines(keepends=True)
    for tag, a, b, c, d in difflib.SequenceMatcher(None, mine, its, autojunk=False).get_opcodes():
        parts += mine[a:b] if tag == "equal" else _common_words("".join(mine[a:b]), "".join(its[c:d]))
    return re.sub(rf"{MASK}(?:\s*{MASK})+", MASK, "".join(parts))


def _common_words(one: str, other: str) -> Iterable[str]:
    mine, its = _words(one), _words(other)
    for tag, a, b, _, _ in difflib.SequenceMatcher(None, mine, its, autojunk=False).get_opcodes():
        yield "".join(mine[a:b]) if tag == "equal" else MASK


def fits(pattern: str, text: str) -> bool:
    """Whether a prompt is one of those that a masked one stands for: each mask may be anything."""
    if pattern == text:
        return True
    if MASK not in pattern:
        return False
    parts = [part.strip() for part in pattern.split(MASK)]
    at = 0
    for place, part in enumerate(parts):
        found = text.find(part, at)
        if found < 0 or (place == 0 and text[:found].strip()):
            return False
        at = found + len(part)
    return not parts[-1] or text.rstrip().endswith(parts[-1])


def _explain(role: str, before: Told, now: Told) -> Iterable[str]:
    names = [{_name(tool): tool for tool in one.tools} for one in (before, now)]
    for name in sorted(names[0].keys() | names[1].keys()):
        old, new = names[0].get(name), names[1].get(name)
        if old is None:
            yield f"{role}: tool {name} is new"
        elif new is None:
            yield f"{role}: tool {name} is gone"
        elif old != new:
            yield f"{role}: tool {name} differs"
            yield from _lines(json.dumps(json.loads(old), indent=1), json.dumps(json.loads(new), indent=1))
    if before.system != now.system and not fits(before.system, now.system):
        yield f"{role}: the system prompt differs"
        yield from _lines(before.system, now.system)


def _lines(old: str, new: str) -> Iterable[str]:
    for line in list(difflib.unified_diff(old.splitlines(), new.splitlines(), "training", "now", lineterm="", n=1))[2:]:
        yield f"  {line[:200]}"


def _ratio(one: str, other: str) -> float:
    """The share of words that two texts have in common, wherever they stand."""
    mine, its = Counter(one.split()), Counter(other.split())
    both = mine.total() + its.total()
    return 2 * (mine & its).total() / both if both else 1.0


def _words(text: str) -> list[str]:
    return re.findall(r"\s+|\w+|[^\w\s]", text)


def _name(tool: str) -> str:
    data = json.loads(tool)
    return str(data.get("name", "")) if isinstance(data, dict) else ""


def _schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool without the wrapping that dialects put around it."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
