"""Which chains go into which micro-batch. Contract: pure planning on lengths; no torch, no model.

A chain becomes one row, cut after its last trained token. Rows are sorted by length and padded on the right: under a
causal mask what stands right of a token cannot reach it, so no attention mask is needed. Invariants: every row is in
exactly one micro-batch; a micro-batch holds at most `budget` tokens, padding included, unless a single row is longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inspan.errors import InspanError
from inspan.trace.records import ChainCredit, Tokens


@dataclass(frozen=True, slots=True)
class Row:
    """A chain as the model sees it: `positions` (ascending, each ≥ 1) are the trained tokens of `tokens`."""

    tokens: Tokens
    positions: tuple[int, ...]


def make_row(credit: ChainCredit) -> Row:
    """The row of a chain. A token is trained when its weight is above 0.

    Raises InspanError when lists differ in length, a weight is negative or on a token that may not be trained, or the
    first token (which has no context) is to be trained.
    """
    chain = credit.chain
    lists = {"trained": chain.trained, "logprobs": chain.logprobs}
    for name, values in (lists | {"weights": credit.weights, "advantages": credit.advantages}).items():
        if len(values) != len(chain.tokens):
            raise _bad(credit, f"{len(values)} {name} for {len(chain.tokens)} tokens")
    positions = tuple(i for i, w in enumerate(credit.weights) if w != 0)
    if any(credit.weights[i] < 0 or not chain.trained[i] for i in positions):
        raise _bad(credit, "a weight is negative, or lies on a token that is not to be trained")
    if positions and positions[0] == 0:
        raise _bad(credit, "the first token of a chain has no context and cannot be trained")
    return Row(chain.tokens[: positions[-1] + 1] if positions else (), positions)


def _bad(credit: ChainCredit, what: str) -> InspanError:
    where = f"chain of session {credit.chain.session!r} (group {credit.group}, rollout {credit.rollout})"
    return InspanError(what, where=where, hint="this is a fault of the credit rule")


def plan(lengths: Sequence[int], budget: int, *, overhead: int = 128) -> list[tuple[int, ...]]:
    """Indices of rows for each micro-batch, longest first; rows of length 0 are left out.

    Minimises padded tokens plus `overhead` (what starting a micro-batch costs, in tokens) over all cuts of the rows in
    order of length: a dynamic programme, since any better partition can be sorted into one of those.
    """
    order = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (-lengths[i], i))
    best, cut = [0.0], [0]
    for end in range(1, len(order) + 1):
        options = []
        for start in range(end - 1, -1, -1):
            padded = lengths[order[start]] * (end - start)
            if padded > budget and start < end - 1:
                break  # longer rows further left only make it larger
            options.append((best[start] + padded + overhead, start))
        cost, start = min(options)
        best.append(cost)
        cut.append(start)
    batches: list[tuple[int, ...]] = []
    end = len(order)
    while end > 0:
        batches.append(tuple(order[cut[end] : end]))
        end = cut[end]
    return batches[::-1]


def padded_tokens(lengths: Sequence[int], batches: Iterable[Sequence[int]]) -> int:
    """Tokens that the model processes, padding included."""
    return sum(len(b) * max(lengths[i] for i in b) for b in batches)


def unique_tokens(rows: Iterable[Tokens]) -> int:
    """Tokens of distinct prefixes: what would be processed if no prefix (fork, shared prompt) were repeated."""
    total, before = 0, ()
    for tokens in sorted(rows):
        total += len(tokens) - _common(before, tokens)
        before = tokens
    return total


def _common(a: Tokens, b: Tokens) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisect on slices: comparing them runs in C
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
