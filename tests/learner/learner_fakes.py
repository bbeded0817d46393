"""Tiny models and hand-made credits for the learner's tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from inspan.learner.model import prepare, token_logprobs
from inspan.learner.packing import Row, pack
from inspan.trace.records import Chain, ChainCredit

VOCABULARY = 37


def tiny_model(seed: int = 0, *, lora=None, checkpointing: bool = False, tied: bool = True):
    """A two-layer Llama of 37 tokens, ready to train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return prepare(LlamaForCausalLM(config), lora=lora, gradient_checkpointing=checkpointing)


def make_credit(rng, *, rollout: int, group: int, length: int, advantage=None, noise: float = 0.3, version: int = 0):
    """A chain of random tokens with alternating context and sampled spans and random behaviour log-probs."""
    tokens = tuple(int(t) for t in rng.integers(0, VOCABULARY, length))
    trained = tuple(bool(i > 0 and (i // 3) % 2) for i in range(length))
    level = float(rng.normal()) if advantage is None else advantage
    chain = Chain(
        session="s",
        agent="main",
        policy="policy",
        tokens=tokens,
        trained=trained,
        logprobs=tuple(float(-3.6 + noise * rng.normal()) if t else 0.0 for t in trained),
        versions=tuple(version if t else -1 for t in trained),
        turns=tuple(0 if t else -1 for t in trained),
        nodes=(0,),
    )
    advantages = tuple(level if t else 0.0 for t in trained)
    return ChainCredit(chain, advantages, tuple(float(t) for t in trained), rollout=rollout, group=group)


def chain_of(tokens, *, trained, rollout: int = 0, group: int = 0, advantage: float = 1.0):
    """A chain of the given tokens, of which the positions in `trained` were sampled with log-prob −1."""
    mask = tuple(i in trained for i in range(len(tokens)))
    numbers = tuple(float(t) for t in mask)
    integers = tuple(0 if t else -1 for t in mask)
    logprobs = tuple(-1.0 if t else 0.0 for t in mask)
    chain = Chain("s", "main", "policy", tuple(tokens), mask, logprobs, integers, integers, (0,))
    return ChainCredit(chain, tuple(advantage * n for n in numbers), numbers, rollout=rollout, group=group)


def make_credits(seed: int = 0, *, groups: int = 3, members: int = 4, chains: int = 2, on_policy=None):
    """Groups × members × chains of uneven lengths; `on_policy` (a model) fills in its own log-probs."""
    rng = np.random.default_rng(seed)
    credits = []
    for group in range(groups):
        for member in range(members):
            for _ in range(int(rng.integers(1, chains + 1))):
                length = int(rng.integers(5, 40))
                credits.append(make_credit(rng, rollout=member, group=group, length=length))
    if on_policy is not None:
        for i, credit in enumerate(credits):
            credits[i] = with_logprobs(credit, model_logprobs(on_policy, credit))
    return credits


def model_logprobs(model, credit, temperature: float = 1.0):
    """The model's log-prob of every trained token of a chain (0.0 elsewhere)."""
    positions = tuple(i for i, t in enumerate(credit.chain.trained) if t)
    with torch.no_grad():
        logp, _ = token_logprobs(model, pack([Row(credit.chain.tokens, positions)]), temperature=temperature)
    out = [0.0] * len(credit.chain.tokens)
    for position, value in zip(positions, logp.tolist(), strict=True):
        out[position] = value
    return tuple(out)


def with_logprobs(credit, logprobs):
    """The same credit with other behaviour log-probs."""
    return replace(credit, chain=replace(credit.chain, logprobs=tuple(logprobs)))
