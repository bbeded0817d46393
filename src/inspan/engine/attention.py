"""Attention over the pool. Contract: softmax(q·k + mask)·v, on views of the pool, one mask for all layers.

Queries arrive scaled (the weights hold the factor). A step's decode block is taken span by span: one batched product
for the scores of all its rows, one for the values; a query of each head of a group is one row of its kv head's product.
Segments (prompts) go one by one, long ones in pieces, so that scores never take much memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inspan.engine.kv import KVPool, round_up

SCORES = 1 << 22
"""Most scores of a segment that are held at once."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `first … last` of the decode block, the longest busy one of which has `reach` tokens (incl. this one)."""

    first: int
    last: int
    reach: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `at … at + length` of the batch are positions `start …` of pool row `row`."""

    at: int
    length: int
    row: int
    start: int

    def pieces(self, length: int) -> list[Segment]:
        """The segment in pieces of at most `length` tokens."""
        return [
            Segment(self.at + i, min(length, self.length - i), self.row, self.start + i)
            for i in range(0, self.length, length)
        ]


class Attention:
    """Attention of one batch: `positions` (N,) of its tokens, the first of which are the decode block."""

    def __init__(
        self, pool: KVPool, groups: int, positions: Tensor, spans: Sequence[Span], segments: Sequence[Segment]
    ) -> None:
        self.pool, self.groups = pool, groups
        self.spans: list[tuple[Span, Tensor]] = []
        if spans:
            spans = [Span(s.first, s.last, min(round_up(s.reach, 16), pool.positions)) for s in spans]
            mask = prefix_mask(positions[: spans[-1].last] + 1, max(s.reach for s in spans)).unsqueeze(1)
            self.spans = [(s, mask[s.first : s.last, :, : s.reach]) for s in spans]
        self.segments: list[tuple[Segment, Tensor]] = []
        for whole in segments:
            heads = pool.kv_heads * groups
            for s in whole.pieces(max(16, SCORES // (heads * (whole.start + whole.length)))):
                stop = s.start + s.length
                self.segments.append((s, prefix_mask(torch.arange(s.start + 1, stop + 1), stop)))

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Mix values for queries (N, H, d), heads in the order (kv head, group); the result is (N, H·d)."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        parts = [self._span(keys, values, q, s, mask) for s, mask in self.spans]
        parts += [self._segment(keys, values, q, s, mask) for s, mask in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _span(self, keys: Tensor, values: Tensor, q: Tensor, s: Span, mask: Tensor) -> Tensor:
        count, heads, dim = s.last - s.first, q.shape[1], q.shape[2]
        mine = q[s.first : s.last].reshape(-1, self.groups, dim)  # (rows · K, G, d)
        scores = torch.bmm(mine, keys[s.first : s.last, ..., : s.reach].flatten(0, 1))
        scores.view(count, heads, -1).add_(mask)
        mixed = torch.bmm(torch.softmax(scores, -1), values[s.first : s.last, :, : s.reach].flatten(0, 1))
        return mixed.view(count, heads * dim)

    def _segment(self, keys: Tensor, values: Tensor, q: Tensor, s: Segment, mask: Tensor) -> Tensor:
        kv_heads, stop = self.pool.kv_heads, s.start + s.length
        # (T, K·G, d) → (K, G·T, d): the queries of a group share their kv head's product
        mine = q[s.at : s.at + s.length].transpose(0, 1).reshape(kv_heads, self.groups * s.length, -1)
        scores = torch.bmm(mine, keys[s.row, ..., :stop])
        scores.view(-1, s.length, stop).add_(mask)
        mixed = torch.bmm(torch.softmax(scores, -1), values[s.row, :, :stop])
        return mixed.view(-1, s.length, q.shape[2]).transpose(0, 1).reshape(s.length, -1)


def prefix_mask(lengths: Tensor, width: int) -> Tensor:
    """Additive mask (n, width): 0 at positions < length, −inf from there on."""
    return torch.zeros(lengths.shape[0], width).masked_fill_(torch.arange(width) >= lengths.unsqueeze(1), float("-inf"))
