"""Attention over a tree of segments, for every transformers model that lets its attention be chosen.

Contract: a query sees the keys of its own segment up to itself and all keys of the segments above, and nothing else, so
each row of a `Packed` micro-batch is computed as if it stood alone. Without segments (generation, a plain forward) it
is transformers' own SDPA attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inspan.errors import ModelError
from inspan.learner.packing import Segment

NAME = "inspan_tree"


@dataclass(frozen=True, slots=True)
class Part:
    """A segment ready to compute: `mask` (length, keys) is True where a query may look; None: plainly causal."""

    length: int
    path: tuple[int, ...]  # numbers of the segments whose keys it sees, itself last
    mask: Tensor | None


def prepare_parts(segments: tuple[Segment, ...], device: torch.device) -> tuple[Part, ...]:
    """The masks of a micro-batch's segments, shared by all layers."""
    parts = []
    for number, segment in enumerate(segments):
        length, before = segment.length, sum(segments[i].length for i in segment.above)
        mask = torch.ones(length, before + length, dtype=torch.bool, device=device).tril_(before) if before else None
        parts.append(Part(length, (*segment.above, number), mask))
    return tuple(parts)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    parts: tuple[Part, ...] | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query (1, heads, T, dim), key and value (1, kv heads, T, dim)."""
    if parts is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if odd := [n for n in ("softcap", "s_aux", "sliding_window") if options.get(n) is not None]:
        raise ModelError(f"attention with {odd[0]} is not supported by the learner", where=type(module).__name__)
    lengths = [part.length for part in parts]
    queries, keys, values = (x.split(lengths, 2) for x in (query, key, value))
    grouped = key.shape[1] != query.shape[1]
    out = []
    for part, q in zip(parts, queries, strict=True):
        k, v = (torch.cat([x[i] for i in part.path], 2) if part.path[1:] else x[part.path[0]] for x in (keys, values))
        causal = part.mask is None
        one = scaled_dot_product_attention(
            q, k, v, attn_mask=part.mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
        out.append(one)
    return torch.cat(out, 2).transpose(1, 2), None


def install(model: Any) -> None:
    """Let a transformers model use this attention; raises ModelError when it cannot be chosen."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    kinds = getattr(model.config, "layer_types", None) or []
    windowed = "sliding_attention" in kinds or (not kinds and getattr(model.config, "sliding_window", None))
    if windowed or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError("only full attention is supported by the learner", where=model.config.model_type)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError) as error:
        raise ModelError(f"its attention cannot be chosen: {error}", where=model.config.model_type) from error


def installed(model: Any) -> bool:
    """Whether a transformers model uses this attention."""
    return getattr(model.config, "_attn_implementation", None) == NAME
