"""One forward pass over a ragged batch. Contract: the logits of the transformers forward, to float rounding.

A batch is a *decode block* (one token for each of the rows 0…n of the pool, in order, idle rows included: their result
is ignored and their write lands where the next token of that row will) followed by *segments* (several tokens of one
row: prompts, or chunks of them). All matrix products run over all tokens at once; attention runs once over the block,
on views of the pool, and once a segment. Nothing is gathered.

`forward_fixed` computes the same in blocks of a fixed shape, one attention row a token, over keys padded to a fixed
granularity. There a token's bits depend on its own sequence alone, not on what else is in the batch, how a prompt is
cut, or what came from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inspan.engine.kv import KVPool, round_up
from inspan.engine.weights import Layer, Weights

BLOCK = 64
"""Tokens in a block of `forward_fixed`."""
FIXED_STEP = 512
"""Granularity of keys in `forward_fixed`: the block over which torch's CPU attention accumulates."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `at … at + length` of the batch are positions `start …` of pool row `row`."""

    at: int
    length: int
    row: int
    start: int


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `first … last` of the decode block, the longest busy one of which has `reach` tokens (incl. this one)."""

    first: int
    last: int
    reach: int


@dataclass(slots=True)
class Batch:
    """What to run. `tokens`, `positions` (N,) int64; the first `block` of them are the decode block, cut into `spans`.

    `rows` (N,) int64 is each token's pool row.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    block: int
    spans: Sequence[Span]
    segments: Sequence[Segment]
    wanted: Tensor | None  # indices of the tokens whose logits are wanted; None: exactly the block's


class Rotary:
    """Table of rotations e^{i·position·frequency}, shape (positions, dim/2), complex64; grows on demand."""

    def __init__(self, weights: Weights) -> None:
        self._frequencies = weights.spec.rope.frequencies(weights.spec.head_dim)
        self._table = torch.empty(0, weights.spec.head_dim // 2, dtype=torch.complex64)

    def __call__(self, positions: Tensor, longest: int) -> Tensor:
        """Rotations of the given positions (all < `longest`), shape (N, 1, dim/2)."""
        if longest > self._table.shape[0]:
            angles = torch.arange(round_up(longest, 256)).float()[:, None] * self._frequencies
            self._table = torch.complex(angles.cos(), angles.sin())
        return self._table.index_select(0, positions).unsqueeze(1)


def forward(weights: Weights, pool: KVPool, rotary: Rotary, batch: Batch) -> Tensor:
    """Logits (wanted, vocab) of a batch; writes the batch's keys and values into the pool."""
    s = weights.spec
    x = weights.embed.index_select(0, batch.tokens)
    rotations = rotary(batch.positions, pool.positions)
    slots = _slots(pool, batch)
    attend = _Attention(pool, s.heads // s.kv_heads, batch)
    for i, layer in enumerate(weights.layers):
        qkv = _project(weights, layer, x, rotations)
        pool.flat[i].index_copy_(0, slots, qkv[:, s.heads :].reshape(-1, s.head_dim))
        mixed = attend(i, qkv[:, : s.heads])
        x = _finish(weights, layer, x, mixed)
    if batch.wanted is not None:
        x = x.index_select(0, batch.wanted)
    return torch.mm(F.rms_norm(x, (s.hidden,), weights.norm, s.eps), weights.head)


def _project(weights: Weights, layer: Layer, x: Tensor, rotations: Tensor) -> Tensor:
    """Queries, keys and values (N, H+2K, d), rotated."""
    s = weights.spec
    h = F.rms_norm(x, (s.hidden,), layer.norm, s.eps)
    flat = torch.mm(h, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)
    qkv = flat.view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
    turned = qkv[:, : s.heads + s.kv_heads]
    if layer.qk_norm is not None:
        turned.copy_(F.rms_norm(turned, (s.head_dim,), None, s.eps).mul_(layer.qk_norm))
    if weights.dtype == torch.float32:
        torch.view_as_complex(turned.unflatten(-1, (-1, 2))).mul_(rotations)
    else:
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
        turned.copy_(torch.view_as_real(pairs * rotations).flatten(-2))
    return qkv


def _finish(weights: Weights, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
    """Output projection, residual and the feed-forward part."""
    s = weights.spec
    x = torch.addmm(x, mixed, layer.out)
    if layer.out_bias is not None:
        x += layer.out_bias
    gate_up = torch.mm(F.rms_norm(x, (s.hidden,), layer.mlp_norm, s.eps), layer.gate_up)
    h = F.silu(gate_up[:, : s.intermediate]).mul_(gate_up[:, s.intermediate :])
    return torch.addmm(x, h, layer.down)


def _slots(pool: KVPool, batch: Batch) -> Tensor:
    """Where each token's keys and values go in the flat pool: (N · 2K,)."""
    heads = torch.arange(2 * pool.kv_heads) * pool.positions
    at = batch.rows * (2 * pool.kv_heads * pool.positions) + batch.positions
    return (at.unsqueeze(1) + heads).flatten()


class _Attention:
    """Attention of a batch over the pool; masks are made once and serve every layer."""

    def __init__(self, pool: KVPool, groups: int, batch: Batch) -> None:
        self.pool, self.groups, self.batch = pool, groups, batch
        self.spans: list[tuple[Span, Tensor]] = []
        if batch.block:
            spans = [Span(s.first, s.last, min(round_up(s.reach, 16), pool.positions)) for s in batch.spans]
            mask = prefix_mask(batch.positions[: batch.block] + 1, max(s.reach for s in spans), pool.dtype)
            self.spans = [(s, mask[s.first : s.last, None, None, : s.reach]) for s in spans]
        self.masks = [self._causal(s) for s in batch.segments]

    def _causal(self, s: Segment) -> Tensor:
        return prefix_mask(torch.arange(s.start + 1, s.start + s.length + 1), s.start + s.length, self.pool.dtype)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Mix values for queries (N, H, d); the result (N, G·K·d) is in the order of `Layer.out`."""
        kv, kv_heads = self.pool.layers[layer], self.pool.kv_heads
        folded = q.unflatten(1, (kv_heads, self.groups))
        parts = []
        for s, mask in self.spans:
            stored = kv[s.first : s.last, :, : s.reach]
            k, v = stored[:, :kv_heads], stored[:, kv_heads:]
            o = F.scaled_dot_product_attention(folded[s.first : s.last], k, v, attn_mask=mask)
            parts.append(o.transpose(1, 2).reshape(s.last - s.first, -1))
        for segment, mask in zip(self.batch.segments, self.masks, strict=True):
            parts.append(self._segment(kv, folded, segment, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _segment(self, kv: Tensor, folded: Tensor, s: Segment, mask: Tensor) -> Tensor:
        kv_heads, stop = self.pool.kv_heads, s.start + s.length
        # (T, K, G, d) → (K, G, T, d): a kv head is a batch entry, its query heads share the keys by a stride of 0
        mine = folded[s.at : s.at + s.length].permute(1, 2, 0, 3)
        k = kv[s.row, :kv_heads, None, :stop].expand(-1, self.groups, -1, -1)
        v = kv[s.row, kv_heads:, None, :stop].expand(-1, self.groups, -1, -1)
        o = F.scaled_dot_product_attention(mine, k, v, attn_mask=mask[None, None])
        return o.permute(2, 1, 0, 3).reshape(s.length, -1)


def prefix_mask(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (n, width): 0 at positions < length, −inf from there on."""
    return torch.zeros((lengths.shape[0], width), dtype=dtype).masked_fill_(
        torch.arange(width) >= lengths.unsqueeze(1), float("-inf")
    )


def forward_fixed(weights: Weights, pool: KVPool, rotary: Rotary, batch: Batch) -> Tensor:
    """Like `forward`, with results whose bits do not depend on the rest of the batch (see the module's contract)."""
    outputs = []
    for first in range(0, batch.block, BLOCK):
        last = min(first + BLOCK, batch.block)
        outputs.append(_fixed_block(weights, pool, rotary, batch, first, last, [Segment(first, last - first, -1, 0)]))
    for first in range(batch.block, batch.tokens.shape[0], BLOCK):
        last = min(first + BLOCK, batch.tokens.shape[0])
        pieces = [p for s in batch.segments if (p := _cut(s, first, last)) is not None]
        outputs.append(_fixed_block(weights, pool, rotary, batch, first, last, pieces))
    x = torch.cat(outputs)
    x = x[: batch.block] if batch.wanted is None else x.index_select(0, batch.wanted)
    heads = [torch.mm(_padded(part), weights.head)[: part.shape[0]] for part in x.split(BLOCK)]
    return torch.cat(heads)


def _cut(s: Segment, first: int, last: int) -> Segment | None:
    """The part of a segment that lies in tokens first…last."""
    low, high = max(s.at, first), min(s.at + s.length, last)
    return Segment(low, high - low, s.row, s.start + low - s.at) if low < high else None


def _padded(x: Tensor) -> Tensor:
    return x if x.shape[0] == BLOCK else F.pad(x, (0, 0, 0, BLOCK - x.shape[0]))


def _fixed_block(
    weights: Weights, pool: KVPool, rotary: Rotary, batch: Batch, first: int, last: int, pieces: Sequence[Segment]
) -> Tensor:
    """Normed hidden states (last - first, D) of tokens first…last; a piece with row -1 is decode rows, in order."""
    s, size = weights.spec, last - first
    positions = batch.positions[first:last]
    x = _padded(weights.embed.index_select(0, batch.tokens[first:last]))
    rotations = rotary(F.pad(positions, (0, BLOCK - size)), pool.positions)
    part = Batch(batch.tokens[first:last], positions, batch.rows[first:last], 0, (), (), None)
    slots = _slots(pool, part)
    decode = pieces[0].row < 0
    reach = max(s.reach for s in batch.spans) if decode else max(p.start + p.length for p in pieces)
    reach = round_up(reach, FIXED_STEP)
    mask = prefix_mask(positions + 1, reach, pool.dtype)[:, None, None]
    for i, layer in enumerate(weights.layers):
        qkv = _project(weights, layer, x, rotations)
        pool.flat[i].index_copy_(0, slots, qkv[:size, s.heads :].reshape(-1, s.head_dim))
        mixed = torch.zeros(BLOCK, s.heads * s.head_dim, dtype=x.dtype)
        for p in pieces:
            low, high = p.at - first, p.at - first + p.length
            stored = pool.layers[i]
            # decode rows look at their own keys, the tokens of a prompt all at those of one row
            kv = stored[p.at : p.at + p.length] if p.row < 0 else stored[p.row].expand(p.length, -1, -1, -1)
            q = qkv[low:high, : s.heads].view(p.length, s.kv_heads, s.heads // s.kv_heads, -1)
            k, v = kv[:, : s.kv_heads, :reach], kv[:, s.kv_heads :, :reach]
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[low:high])
            mixed[low:high] = o.transpose(1, 2).reshape(p.length, -1)
        x = _finish(weights, layer, x, mixed)
    return F.rms_norm(x, (s.hidden,), weights.norm, s.eps)[:size]
