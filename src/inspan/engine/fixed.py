"""The forward pass in fixed shapes. Contract: a token's bits depend on its own sequence and the weights alone.

Not on what else is in the batch, how a prompt is cut, or what came from the prefix cache: all tokens go through every
matrix product in blocks of `BLOCK` rows, and attention treats each token as one query over keys padded to `STEP`, the
block over which torch's CPU kernel accumulates. Slower than `forward`; what deterministic runs use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inspan.engine.attention import Segment, prefix_mask
from inspan.engine.forward import Batch, Rotary, finish, project
from inspan.engine.kv import KVPool, round_up
from inspan.engine.weights import Weights

BLOCK = 64
"""Tokens in a block."""
STEP = 512
"""Granularity of keys; a pool used here grows by this step."""


def forward_fixed(weights: Weights, pool: KVPool, rotary: Rotary, batch: Batch) -> Tensor:
    """Like `forward`: logits (wanted, vocab) of a batch."""
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
    places = pool.places(batch.rows[first:last], positions)
    decode = pieces[0].row < 0
    reach = max(s.reach for s in batch.spans) if decode else max(p.start + p.length for p in pieces)
    reach = round_up(reach, STEP)
    mask = prefix_mask(positions + 1, reach)[:, None, None]
    for i, layer in enumerate(weights.layers):
        q, k, v = project(weights, layer, x, rotations)
        pool.write(i, places, k[:size], v[:size])
        mixed = torch.zeros(BLOCK, s.heads * s.head_dim)
        for p in pieces:
            low, high = p.at - first, p.at - first + p.length
            # decode rows look at their own keys, the tokens of a prompt all at those of one row
            rows = slice(p.at, p.at + p.length) if p.row < 0 else slice(p.row, p.row + 1)
            keys = pool.keys[i][rows, ..., :reach].transpose(2, 3).contiguous().expand(p.length, -1, -1, -1)
            values = pool.values[i][rows, :, :reach].expand(p.length, -1, -1, -1)
            queries = q[low:high].reshape(p.length, s.kv_heads, s.heads // s.kv_heads, -1)
            o = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[low:high], scale=1.0)
            mixed[low:high] = o.reshape(p.length, -1)
        x = finish(weights, layer, x, mixed)
    return F.rms_norm(x, (s.hidden,), weights.norm, s.eps)[:size]
