"""Which chains go into which micro-batch, each shared prefix once. Contract: pure planning; no torch, no model.

A chain becomes a row, cut after its last trained token. Rows that begin alike (a group's prompt, the forks of a
rollout) form a tree: a `Packed` micro-batch lays out the tree's segments one after the other, and a token attends to
its own segment up to itself and to the segments above it. So nothing is padded and nothing is computed twice.
Invariants: every row is in exactly one micro-batch, every trained token at exactly one place of it; a micro-batch holds
at most `budget` tokens unless a single row is longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from inspan.errors import InspanError
from inspan.trace.records import ChainCredit, Tokens


@dataclass(frozen=True, slots=True)
class Row:
    """A chain as the model sees it: `positions` (ascending, each ≥ 1) are the trained tokens of `tokens`."""

    tokens: Tokens
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of `length` tokens without a fork in it; `above` are the numbers of its ancestors, from the root down.

    Segments lie one after the other in the order of their numbers, ancestors first.
    """

    length: int
    above: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch. The targets are the trained tokens of the rows, in the order of the rows.

    `contexts[i]` is the flat position of the token before target i, `labels[i]` the target's id.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]  # position of each token in its row
    segments: tuple[Segment, ...]
    contexts: tuple[int, ...]
    labels: tuple[int, ...]


def make_row(credit: ChainCredit) -> Row:
    """The row of a chain. A token is trained when its weight is above 0.

    Raises InspanError when lists differ in length, a weight is negative or on a token that may not be trained, or the
    first token (which has no context) is to be trained.
    """
    links = credit.chain
    lists = {"trained": links.trained, "logprobs": links.logprobs}
    for name, values in (lists | {"weights": credit.weights, "advantages": credit.advantages}).items():
        if len(values) != len(links.tokens):
            raise _bad(credit, f"{len(values)} {name} for {len(links.tokens)} tokens")
    positions = tuple(i for i, w in enumerate(credit.weights) if w != 0)
    if any(credit.weights[i] < 0 or not links.trained[i] for i in positions):
        raise _bad(credit, "a weight is negative, or lies on a token that is not to be trained")
    if positions and positions[0] == 0:
        raise _bad(credit, "the first token of a chain has no context and cannot be trained")
    return Row(links.tokens[: positions[-1] + 1] if positions else (), positions)


def _bad(credit: ChainCredit, what: str) -> InspanError:
    where = f"chain of session {credit.chain.session!r} (group {credit.group}, rollout {credit.rollout})"
    return InspanError(what, where=where, hint="this is a fault of the credit rule")


def plan(rows: Sequence[Row], budget: int) -> list[tuple[int, ...]]:
    """Indices of the rows of each micro-batch; rows without tokens are left out.

    In lexicographic order, so that rows that begin alike come together; a micro-batch is full when the tokens of its
    tree exceed `budget`.
    """
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    size, before = 0, ()
    for index in sorted((i for i, r in enumerate(rows) if r.tokens), key=lambda i: rows[i].tokens):
        tokens = rows[index].tokens
        new = len(tokens) - _common(before, tokens)
        if current and size + new > budget:
            batches.append(tuple(current))
            current, size, new = [], 0, len(tokens)
        size += new
        current.append(index)
        before = tokens
    return [*batches, tuple(current)] if current else batches


def pack(rows: Sequence[Row]) -> Packed:
    """Lay out the tree of the rows (none of them empty)."""
    tokens: list[int] = []
    depths: list[int] = []
    segments: list[Segment] = []
    places: list[range] = []
    paths: dict[int, tuple[int, ...]] = {}
    for owner, low, high, above, ending in _runs([r.tokens for r in rows]):
        places.append(range(len(tokens), len(tokens) + high - low))
        tokens += rows[owner].tokens[low:high]
        depths += range(low, high)
        paths |= {row: (*above, len(segments)) for row in ending}
        segments.append(Segment(high - low, above))
    contexts: list[int] = []
    for index, row in enumerate(rows):
        at = list(chain.from_iterable(places[number] for number in paths[index]))
        contexts += [at[p - 1] for p in row.positions]
    labels = tuple(r.tokens[p] for r in rows for p in r.positions)
    return Packed(tuple(tokens), tuple(depths), tuple(segments), tuple(contexts), labels)


def _runs(rows: Sequence[Tokens]) -> Iterator[tuple[int, int, int, tuple[int, ...], list[int]]]:
    """Segments of the rows' tree, parents first: (a row that holds it, its depths low and high, numbers of the segments
    above, rows that end with it)."""
    order = sorted(range(len(rows)), key=lambda i: rows[i])
    shared = [0, *(_common(rows[a], rows[b]) for a, b in pairwise(order))]  # with the row before
    waiting: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
    number = 0
    while waiting:
        first, last, depth, above = waiting.pop()  # rows order[first:last] agree up to `depth`
        while first < last:
            end = next((i for i in range(first + 1, last) if shared[i] <= depth), last)
            deep = min([len(rows[order[first]]), *shared[first + 1 : end]])
            done = first
            while done < end and len(rows[order[done]]) == deep:
                done += 1
            yield order[first], depth, deep, above, order[first:done]
            if done < end:
                waiting.append((done, end, deep, (*above, number)))
            number += 1
            first = end


def unique_tokens(rows: Iterable[Tokens]) -> int:
    """Tokens of distinct prefixes: what is left to process when no prefix (fork, shared prompt) is repeated."""
    total, before = 0, ()
    for tokens in sorted(rows):
        total += len(tokens) - _common(before, tokens)
        before = tokens
    return total


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisect on slices: comparing them runs in C
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
