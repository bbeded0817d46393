"""One forward pass over a ragged batch. Contract: the logits of the transformers forward, to float rounding.

A batch is a *decode block* (one token for each of the rows 0…n of the pool, in order, idle rows included: their result
is ignored and their write lands where the next token of that row will) followed by *segments* (several tokens of one
row: prompts, or chunks of them). All matrix products run over all tokens at once; attention works on views of the
pool, where nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inspan.engine.attention import Attention, Segment, Span
from inspan.engine.kv import KVPool, round_up
from inspan.engine.weights import Layer, Weights


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


def rms(x: Tensor, eps: float) -> Tensor:
    """Rows of x (N, D) divided by their root mean square; a norm's weight is in the matrix that follows."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.square_().mul_(1 / x.shape[1]).add_(eps).rsqrt_()


def forward(weights: Weights, pool: KVPool, rotary: Rotary, batch: Batch) -> Tensor:
    """Logits (wanted, vocab) of a batch; writes the batch's keys and values into the pool."""
    s = weights.spec
    x = weights.embed.index_select(0, batch.tokens)
    rotations = rotary(batch.positions, pool.positions)
    places = pool.places(batch.rows, batch.positions)
    attend = Attention(pool, s.heads // s.kv_heads, batch.positions, batch.spans, batch.segments)
    for i, layer in enumerate(weights.layers):
        q, k, v = project(weights, layer, x, rotations)
        pool.write(i, places, k, v)
        x = finish(weights, layer, x, attend(i, q))
    if batch.wanted is not None:
        x = x.index_select(0, batch.wanted)
    return torch.mm(F.rms_norm(x, (s.hidden,), weights.norm, s.eps), weights.head)


def project(weights: Weights, layer: Layer, x: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (N, H, d), keys and values (N, K, d) of hidden states (N, D); queries scaled, both rotated."""
    s = weights.spec
    h = rms(x, s.eps)
    flat = torch.mm(h, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)
    turning = s.heads + s.kv_heads
    qkv = flat.view(-1, turning + s.kv_heads, s.head_dim)
    turned = qkv[:, :turning]
    if layer.qk_norm is not None:
        turned.copy_(F.rms_norm(turned, (s.head_dim,), None, s.eps).mul_(layer.qk_norm))
    pairs = flat.view(-1, turning + s.kv_heads, s.head_dim // 2, 2)
    torch.view_as_complex(pairs)[:, :turning].mul_(rotations)
    return qkv[:, : s.heads], turned[:, s.heads :], qkv[:, turning:]


def finish(weights: Weights, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
    """Output projection, residual and the feed-forward part."""
    s = weights.spec
    x = torch.addmm(x, mixed, layer.out)
    if layer.out_bias is not None:
        x += layer.out_bias
    gate_up = torch.mm(rms(x, s.eps), layer.gate_up)
    h = F.silu(gate_up[:, : s.intermediate]).mul_(gate_up[:, s.intermediate :])
    return torch.addmm(x, h, layer.down)
