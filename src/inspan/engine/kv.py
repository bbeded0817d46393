"""Keys and values of all rows of one policy. Contract: static tensors, grown in steps; views, never gathers.

Per layer one tensor (row, 2·kv_head, position, dim): keys first, then values, so that one write stores both. Memory
is zeroed, so that positions nobody wrote are finite and a mask of −inf makes them vanish.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inspan.engine.weights import ModelSpec


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


class KVPool:
    """KV of up to `rows` sequences; `step` is the granularity in positions by which it grows."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, step: int = 64) -> None:
        self.kv_heads, self.dim, self.dtype, self.step = spec.kv_heads, spec.head_dim, dtype, step
        self.rows = self.positions = 0
        self.layers: list[Tensor] = [torch.empty(0)] * spec.layers
        self.flat: list[Tensor] = [torch.empty(0)] * spec.layers

    @torch.inference_mode()
    def reserve(self, rows: int, positions: int) -> None:
        """Make room for at least this many rows and positions; what is stored stays."""
        if rows <= self.rows and positions <= self.positions:
            return
        rows = max(rows, self.rows)
        if positions > self.positions:  # by a quarter at least, so that growing costs little in the long run
            positions = round_up(max(positions, self.positions * 5 // 4), self.step)
        positions = max(positions, self.positions)
        for i, old in enumerate(self.layers):
            new = torch.zeros((rows, 2 * self.kv_heads, positions, self.dim), dtype=self.dtype)
            if self.rows:
                new[: self.rows, :, : self.positions] = old
            self.layers[i], self.flat[i] = new, new.view(-1, self.dim)
        self.rows, self.positions = rows, positions

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row to another."""
        for layer in self.layers:
            layer[target, :, :length] = layer[source, :, :length]

    @torch.inference_mode()
    def swap(self, one: int, other: int, one_length: int, other_length: int) -> None:
        """Exchange two rows, of which the given numbers of positions matter."""
        for layer in self.layers:
            kept = layer[one, :, :one_length].clone()
            layer[one, :, :other_length] = layer[other, :, :other_length]
            layer[other, :, :one_length] = kept

    @torch.inference_mode()
    def wipe(self, row: int) -> None:
        """Zero a row (after non-finite values)."""
        for layer in self.layers:
            layer[row].zero_()

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)
