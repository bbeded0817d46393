"""The text of each node, decoded once. Contract: a cache; the texts of a path concatenate to the text of the path.

Renderers that prove a continuation by its text ask for the whole path at every turn: decoding it anew each time would
make a long conversation quadratic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from inspan.trace.graph import MessageGraph
from inspan.trace.records import Tokens

_CONTEXT: Final = 16  # tokens decoded before a node's own: decoders may treat the first token of a text in its own way


class Pieces:
    """The texts of nodes, for as long as their graph lives."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._texts: WeakKeyDictionary[MessageGraph, dict[int, str]] = WeakKeyDictionary()

    def of(self, graph: MessageGraph, path: Sequence[int]) -> list[str]:
        """The text that each node of a path from the root adds."""
        texts = self._texts.setdefault(graph, {})
        for at, node in enumerate(path):
            if node not in texts:
                before = self._before(graph, path[:at])
                text = self._decode(before + graph.nodes[node].tokens)
                texts[node] = text[len(self._decode(before)) :]
        return [texts[node] for node in path]

    def proven(self, graph: MessageGraph, path: Sequence[int], text: str) -> tuple[int, int]:
        """How many nodes of a path are proven to begin a text, and the length of their text."""
        length = 0
        for count, piece in enumerate(self.of(graph, path)):
            if not text.startswith(piece, length):
                return count, length
            length += len(piece)
        return len(path), length

    def _before(self, graph: MessageGraph, path: Sequence[int]) -> Tokens:
        tokens: Tokens = ()
        for node in reversed(path):
            if len(tokens) >= _CONTEXT:
                break
            tokens = graph.nodes[node].tokens[-_CONTEXT:] + tokens
        return tokens[-_CONTEXT:]
