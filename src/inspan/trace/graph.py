"""The message graph of a rollout. Contract: pure bookkeeping, no I/O, no model, no tokenizer.

Sessions hold messages; a node is one message with its parent and the token delta that it adds. An incoming message
list is laid onto the nodes that are there (`match`), descending as long as each message is *proven* identical; what is
left over is new, and only that is rendered. The first message that cannot be proven identical forks, with a reason.

Invariants
- The deltas along a path concatenate to exactly the ids that the engine saw. A sampled node keeps its sampled tokens.
- A node is never changed or removed; ids ascend, a parent's is smaller than its children's.
- An assistant message is identical to a sampled one when both stand under the same parent and have the same call ids
  (the gateway mints them), names, arguments (as JSON values) and content (None is "", text parts are joined), and the
  harness hands its thinking back as it was, or not at all.
- Samples of different tokens that read the same are not guessed at: unless a recorded continuation tells them apart,
  the message forks as "ambiguous sample" and becomes plain context.
- Going on from a context node is always sound, so such a fork is taken again instead of forking anew each turn.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from inspan.trace.records import Message, Node, Session, Tokens

ForkReason = Literal[
    "system changed",  # another system message at the root
    "tools changed",  # the same system message with other tool schemas
    "new conversation",  # started anew under the same system message (a sub-task, a summary)
    "assistant edited",  # an assistant message other than what was sampled here
    "history rewritten",  # an earlier message was replaced and later turns were kept (prunes)
    "rolled back",  # went back to an earlier message and on from there
    "ambiguous sample",  # several samples read like this message but differ in their tokens
    "sampled again",  # a further sample of the same context (`n`, retries)
    "rendering changed",  # the template renders the earlier messages differently now
]
FORK_REASONS: tuple[str, ...] = get_args(ForkReason)

NodeTail = Literal["context", "stopped", "cut"]
"""How a path ends: with a context message, a sampled turn that ended with a stop id, or one that was cut off."""


@dataclass(frozen=True, slots=True)
class Match:
    """How far an incoming message list is known: `depth` messages, the last being `node`; why the rest forks, if so."""

    node: int | None
    depth: int
    fork: ForkReason | None


class MessageGraph:
    """The sessions and nodes of one rollout."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.nodes: list[Node] = []
        self._children: dict[tuple[str, int | None], dict[Hashable, list[int]]] = {}
        self._last: dict[str, tuple[int, Tokens]] = {}  # per session: the path last asked for, and its tokens

    @classmethod
    def restore(cls, sessions: Iterable[Session], nodes: Iterable[Node]) -> MessageGraph:
        """Rebuild a graph from its records, ids as they were (gaps, from nodes never committed, stay gaps).

        Raises ValueError when a parent is missing.
        """
        graph = cls()
        for session in sessions:
            graph.add_session(session)
        for node in sorted(nodes, key=lambda node: node.id):
            if node.parent is not None and not graph.has(node.parent):
                raise ValueError(f"node {node.id} has parent {node.parent}, which is not in the records")
            graph.enter(node)
        return graph

    def add_session(self, session: Session) -> None:
        """Enter a session; raises ValueError when its id is taken or its parent unknown."""
        if session.id in self.sessions:
            raise ValueError(f"session {session.id!r} is already there")
        if session.parent is not None and session.parent not in self.sessions:
            raise ValueError(f"session {session.id!r} has parent {session.parent!r}, which is not there")
        self.sessions[session.id] = session

    def match(self, session: str, messages: Sequence[Message], known: Match | None = None) -> Match:
        """Lay a message list onto a session's nodes as deep as each message is proven identical.

        `known` says where the first `known.depth` messages led when they were laid before.
        """
        start = 0 if known is None else known.depth
        frontiers: list[list[int]] = []
        level: Sequence[int | None] = (None if known is None else known.node,)
        for message in messages[start:] if start else messages:
            key = identity(message)
            if len(level) == 1:  # nearly always
                found = self._children.get((session, level[0]), _NOTHING).get(key)
            else:
                found = [n for parent in level for n in self._children.get((session, parent), _NOTHING).get(key, ())]
            if found and ("reasoning" in message or "reasoning_id" in message):
                found = [n for n in found if _same_thinking(message, self.nodes[n].message)]
            if not found:
                break
            frontiers.append(found)
            level = found
        node, depth, ambiguous = self._resolve(frontiers, start)
        if known is not None and not depth:
            node = known.node
        depth += start
        if ambiguous:
            return Match(node, depth, "ambiguous sample")
        return Match(node, depth, self._reason(session, node, depth, messages))

    def add_context(
        self, session: str, parent: int | None, message: Message, tokens: Tokens, fork: ForkReason | None = None
    ) -> Node:
        """Add a message that nobody sampled; `tokens` is its whole delta."""
        node = Node(len(self.nodes), session, parent, message, tokens, len(tokens), (), (), fork)
        self.enter(node)
        return node

    def draft_sample(
        self,
        session: str,
        parent: int | None,
        message: Message,
        *,
        opening: Tokens,
        tokens: Tokens,
        logprobs: tuple[float, ...],
        versions: tuple[int, ...],
    ) -> Node:
        """A node for a sampled message, not yet entered: `opening` is the generation prompt, `tokens` what came after.

        Raises ValueError when the three lists differ in length. `enter` it once it is durable, before any other node.
        """
        if not len(tokens) == len(logprobs) == len(versions):
            raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
        twice = any(node.sampled for node in self.children(session, parent))
        fork: ForkReason | None = "sampled again" if twice else None
        ids = opening + tokens
        return Node(len(self.nodes), session, parent, message, ids, len(opening), logprobs, versions, fork)

    def enter(self, node: Node) -> None:
        """Enter a node; raises ValueError when its id is taken."""
        if node.id < len(self.nodes):
            raise ValueError(f"node {node.id} is already there")
        while len(self.nodes) < node.id:  # an id that was never committed: a hole that nothing can reach
            self.nodes.append(_HOLE)
        self.nodes.append(node)
        group = self._children.setdefault((node.session, node.parent), {})
        group.setdefault(identity(node.message), []).append(node.id)

    def records(self) -> list[Node]:
        """The nodes, by id."""
        return [node for node in self.nodes if node is not _HOLE]

    def has(self, node: int) -> bool:
        """Whether there is a node of this id."""
        return 0 <= node < len(self.nodes) and self.nodes[node].id == node

    def children(self, session: str, parent: int | None) -> Iterator[Node]:
        """The nodes under a node (or the roots, under None), grouped by message, oldest first within a group."""
        for ids in self._children.get((session, parent), {}).values():
            for node in ids:
                yield self.nodes[node]

    def path(self, node: int | None) -> list[int]:
        """Node ids from the root to `node`, both included."""
        ids: list[int] = []
        while node is not None:
            ids.append(node)
            node = self.nodes[node].parent
        ids.reverse()
        return ids

    def tokens(self, node: int | None, more: Tokens = ()) -> Tokens:
        """All token ids from the root to `node`, and `more` after them: exactly what the engine saw."""
        if node is None:
            return more
        session = self.nodes[node].session
        known, before = self._last.get(session, (None, ()))
        new: list[Tokens] = [more]
        at: int | None = node
        while at is not None and at != known:
            new.append(self.nodes[at].tokens)
            at = self.nodes[at].parent
        if at is not None:
            new.append(before)
        whole: list[int] = []
        for delta in reversed(new):
            whole.extend(delta)  # several times faster than chaining iterators
        tokens = tuple(whole)
        self._last[session] = (node, tokens[: len(tokens) - len(more)])
        return tokens

    def tail(self, node: int | None, stop_ids: Collection[int]) -> NodeTail:
        """How the path to `node` ends, given the ids with which a model ends a turn."""
        if node is None or not self.nodes[node].sampled:
            return "context"
        return "stopped" if self.nodes[node].tokens[-1] in stop_ids else "cut"

    # ---- inside -------------------------------------------------------------------------------------------------

    def _resolve(self, frontiers: list[list[int]], start: int) -> tuple[int | None, int, bool]:
        """The one node that the known messages lead to: (node, depth, whether it stopped short at an ambiguity).

        Frontiers and depths count from the message at `start`.
        """
        if not frontiers:
            return None, 0, False
        if len(frontiers[-1]) == 1:
            return frontiers[-1][0], len(frontiers), False
        paths = [self.path(node) for node in frontiers[-1]]
        for depth in range(len(frontiers)):
            here = list(dict.fromkeys(path[start + depth] for path in paths))
            if len(here) == 1:
                continue
            context = [node for node in here if not self.nodes[node].sampled]
            if not context and len({self.nodes[node].tokens for node in here}) > 1:
                return self.nodes[here[0]].parent, depth, True
            chosen = max(context) if context else here[0]
            paths = [path for path in paths if path[start + depth] == chosen]
        return paths[0][-1], len(frontiers), False

    def _reason(self, session: str, node: int | None, depth: int, messages: Sequence[Message]) -> ForkReason | None:
        if depth == len(messages):
            return None
        siblings = list(self.children(session, node))
        if not siblings:
            return None
        new = messages[depth]
        if node is None and new["role"] == "system":
            content = content_text(new.get("content"))
            systems = [content_text(s.message.get("content")) for s in siblings if s.message["role"] == "system"]
            return "tools changed" if content in systems else "system changed"
        if new["role"] == "assistant" and any(sibling.sampled for sibling in siblings):
            return "assistant edited"
        if any(message["role"] == "assistant" for message in messages[depth:]):
            return "history rewritten"
        if node is None or (depth == 1 and self.nodes[node].message["role"] == "system"):
            return "new conversation"
        return "rolled back"


class KeyedMessage(dict[str, Any]):
    """A message that works out its identity once: not to be changed after it was matched."""

    __slots__ = ("key",)

    def identity(self) -> Hashable:
        """What `identity` says of it."""
        try:
            return self.key
        except AttributeError:
            self.key = _identity(self)
            return self.key


class ToolList(list[Mapping[str, Any]]):
    """Tool schemas of a root message, never to be changed; canonical form (`key`) and names are worked out once."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self.key = json.dumps(self, sort_keys=True)
        self.functions: dict[str, Mapping[str, Any]] = {}
        for tool in self:
            function = tool.get("function", tool)
            self.functions[function["name"]] = function


_NOTHING: dict[Hashable, list[int]] = {}
_HOLE = Node(-1, "", None, {"role": "hole", "content": ""}, (), 0)


def identity(message: Message) -> Hashable:
    """What makes two messages under the same parent the same message."""
    return message.identity() if isinstance(message, KeyedMessage) else _identity(message)


def _identity(message: Message) -> Hashable:
    content = content_text(message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        minted = tuple((call["id"], call["name"], canonical_json(call["arguments"])) for call in calls)
        return (message["role"], content, minted)
    tools = message.get("tools")
    if tools:
        key = tools.key if isinstance(tools, ToolList) else json.dumps(tools, sort_keys=True)
        return (message["role"], content, key)
    return (message["role"], content, message.get("tool_call_id"), message.get("name"))


def _same_thinking(message: Message, known: Message) -> bool:
    """Whether a message may be one that is there, by its thinking: its text, what stands for it, both, or neither."""
    text, mark = message.get("reasoning"), message.get("reasoning_id")
    if text and text != known.get("reasoning"):
        return False
    return not mark or known.get("reasoning_id", mark if text else None) == mark


def content_text(content: Any) -> str:
    """Content in its canonical form: None is "", a list of text parts is their joined text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


@lru_cache(maxsize=4096)
def canonical_json(text: str) -> str:
    """JSON text with sorted keys and numbers in one form (1.0 is 1, true is not 1); text that is no JSON as it is."""
    try:
        return json.dumps(_plain_numbers(json.loads(text)), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return value
