"""Keys and values of all rows of one policy. Contract: static tensors, grown in steps; views, never gathers.

Per layer, keys are (row, kv_head, dim, position) and values (row, kv_head, position, dim): with positions last, the
scores of one query are a sum of whole rows, which a small matrix product does twice as fast. Memory is zeroed, so that
positions nobody wrote are finite and a mask of −inf makes them vanish.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inspan.engine.weights import ModelSpec

FIRST_BYTES = 64 << 20
"""A pool begins with up to 256 positions where these many bytes hold them: small models then seldom grow."""


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens go in a layer's flat keys (N · K · d,) and in its values seen as (… , d) (N · K,)."""

    keys: Tensor
    values: Tensor


class KVPool:
    """KV of up to `rows` sequences; `step` is the granularity in positions by which it grows."""

    def __init__(self, spec: ModelSpec, *, step: int = 64) -> None:
        self.kv_heads, self.dim, self.step = spec.kv_heads, spec.head_dim, step
        self.rows = self.positions = 0
        self.keys: list[Tensor] = [torch.empty(0)] * spec.layers
        self.values: list[Tensor] = [torch.empty(0)] * spec.layers
        self._lines = torch.empty(0)
        self._token_bytes = spec.kv_bytes

    @torch.inference_mode()
    def reserve(self, rows: int, positions: int) -> None:
        """Make room for at least this many rows and positions; what is stored stays."""
        if rows <= self.rows and positions <= self.positions:
            return
        rows = max(rows, self.rows)
        if positions > self.positions:  # by a third at least, so that growing costs little in the long run
            first = 256 if 256 * rows * self._token_bytes <= FIRST_BYTES else 0
            positions = round_up(max(positions, self.positions * 4 // 3, first), self.step)
        positions = max(positions, self.positions)
        old = slice(0, self.rows), slice(None)
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.keys[i] = torch.zeros(rows, self.kv_heads, self.dim, positions)
            self.values[i] = torch.zeros(rows, self.kv_heads, positions, self.dim)
            if self.rows:
                self.keys[i][(*old, slice(None), slice(0, self.positions))] = keys
                self.values[i][(*old, slice(0, self.positions))] = values
        self.rows, self.positions = rows, positions
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

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return self.rows * self.positions * self._token_bytes
