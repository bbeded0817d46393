"""Keys and values of all rows of one policy. Contract: static tensors, grown in steps; views, never gathers.

Per layer, keys are (row, kv_head, dim, position) and values (row, kv_head, position, dim): with positions last, the
scores of one query are a sum of whole rows, which a small matrix product does twice as fast. Positions nobody wrote are
zero, so that they are finite and a mask of −inf makes them vanish; they take no memory, since they are the system's
zero page until something is written there. Every row has as many positions as the longest one needs, so what must give
way is the number of rows in use: `affordable` says how many there may be.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inspan.engine.weights import ModelSpec

FIRST = 256
"""Positions that a pool begins with."""


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def zeros(*shape: int) -> Tensor:
    """Float32 zeros of which only the pages that are written to take memory; all of it goes back when they are freed.

    The allocator behind torch.zeros writes every page, and keeps freed blocks of less than 32 MiB in its heap.
    """
    size = math.prod(shape)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, max(4 * size, 1), **private), dtype=torch.float32, count=size).view(shape)


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens go in a layer's flat keys (N · K · d,) and in its values seen as (… , d) (N · K,)."""

    keys: Tensor
    values: Tensor


class KVPool:
    """KV of `rows` sequences; `step` is the granularity in positions by which it grows, `budget` what it may take."""

    def __init__(self, spec: ModelSpec, *, rows: int, budget: int, step: int = 64) -> None:
        self.kv_heads, self.dim = spec.kv_heads, spec.head_dim
        self.rows, self.budget, self.step = rows, budget, step
        self.positions = 0
        self.keys: list[Tensor] = [torch.empty(0)] * spec.layers
        self.values: list[Tensor] = [torch.empty(0)] * spec.layers
        self._lines = torch.empty(0)
        self._token_bytes = spec.kv_bytes

    def grown(self, positions: int) -> int:
        """How many positions to take on when so many are needed: a third more at least, so as to grow seldom."""
        return round_up(max(positions, self.positions * 4 // 3, FIRST), self.step)

    def affordable(self, positions: int) -> int:
        """How many rows of so many positions the budget holds; 0: not even one."""
        return self.budget // (positions * self._token_bytes)

    @torch.inference_mode()
    def grow(self, positions: int, kept: Sequence[int]) -> None:
        """Have this many positions; of row i the first `kept[i]` stay."""
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.keys[i] = zeros(self.rows, self.kv_heads, self.dim, positions)
            self.values[i] = zeros(self.rows, self.kv_heads, positions, self.dim)
            for row, length in enumerate(kept):
                if length:
                    self.keys[i][row, ..., :length] = keys[row, ..., :length]
                    self.values[i][row, :, :length] = values[row, :, :length]
        self.positions = positions
        self._lines = torch.arange(self.kv_heads * self.dim) * positions  # where a row's lines of keys begin

    def places(self, rows: Tensor, positions: Tensor) -> Places:
        """Places of tokens at (row, position), both (N,)."""
        per_head = rows * (self.kv_heads * self.positions)
        keys = (per_head * self.dim + positions).unsqueeze(1) + self._lines
        values = (per_head + positions).unsqueeze(1) + self._lines[: self.kv_heads]
        return Places(keys.flatten(), values.flatten())

    def write(self, layer: int, places: Places, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values (N, K, d) of the tokens for which `places` was made."""
        self.keys[layer].view(-1).index_copy_(0, places.keys, keys.reshape(-1))
        self.values[layer].view(-1, self.dim).index_copy_(0, places.values, values.reshape(-1, self.dim))

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row to another."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, ..., :length] = keys[source, ..., :length]
            values[target, :, :length] = values[source, :, :length]

    @torch.inference_mode()
    def swap(self, one: int, other: int, one_length: int, other_length: int) -> None:
        """Exchange two rows, of which the given numbers of positions matter."""
        for keys, values in zip(self.keys, self.values, strict=True):
            kept = keys[one, ..., :one_length].clone(), values[one, :, :one_length].clone()
            keys[one, ..., :other_length] = keys[other, ..., :other_length]
            values[one, :, :other_length] = values[other, :, :other_length]
            keys[other, ..., :one_length], values[other, :, :one_length] = kept

    @torch.inference_mode()
    def wipe(self, row: int) -> None:
        """Zero a row (after non-finite values)."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[row].zero_()
            values[row].zero_()
