"""The learner's own speed on a CPU: one packed tree against padded rows, and the share of the machine that it reaches.

    python benchmarks/learner.py [--threads 1] [--rounds 4]

Prints one JSON object a row (`what`, `ours`, `peer`, `ratio`, `unit`); tokens are those of the chains, forward and
backward, whatever each way computes. The two ways alternate and the fastest of each counts, since the machine may be
busy. The peer pads rows of similar length to micro-batches of the same size, without attention masks (causal attention
needs none on the right), and projects to the vocabulary at every position only in the row that says so.
The last row counts six operations a weight for each token computed in the blocks, and for each trained one in the head.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import inspan  # noqa: F401 (before torch: it sets how OpenMP threads wait)

# isort: split
import numpy as np
import torch
from torch import Tensor

from inspan.learner.model import CPU_MICRO_BATCH, prepare, token_logprobs
from inspan.learner.packing import Row, pack, plan, unique_tokens

VOCABULARY = 800


def tiny_llama() -> Any:
    """0.5 M parameters: d128, 2 layers, a vocabulary of 800."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    return prepare(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **more)))


def make_rows(groups: int, members: int, prompt: int, shortest: int, longest: int) -> list[Row]:
    """Multi-turn chains; the members of a group share a prompt, and nearly half of the rest was sampled."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        opening = rng.integers(0, VOCABULARY, prompt).tolist()
        for length in rng.integers(shortest, longest, members).tolist():
            positions = tuple(p for p in range(max(prompt, 20), length) if (p // 20) % 2)
            rows.append(Row((*opening, *rng.integers(0, VOCABULARY, length - prompt).tolist()), positions))
    return rows


def packed(model: Any, rows: list[Row]) -> None:
    """Log-probs of all trained tokens and their gradient, as an update computes them."""
    for batch in plan(rows, CPU_MICRO_BATCH):
        token_logprobs(model, pack([rows[i] for i in batch]))[0].sum().backward()
    model.zero_grad()


def padded(model: Any, rows: list[Row], *, every_position: bool = False) -> None:
    """The same with rows of similar length padded on the right."""
    queue = sorted(rows, key=lambda r: -len(r.tokens))
    while queue:
        width = len(queue[0].tokens)
        count = max(1, CPU_MICRO_BATCH // width)
        part, queue = queue[:count], queue[count:]
        tokens = torch.tensor([[*r.tokens, *[0] * (width - len(r.tokens))] for r in part])
        at = torch.tensor([i * width + p for i, r in enumerate(part) for p in r.positions])
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        logits = model.lm_head(hidden)[at - 1] if every_position else model.lm_head(hidden[at - 1])
        loss: Tensor = logits.log_softmax(-1).gather(1, tokens.flatten()[at][:, None]).sum()
        loss.backward()
    model.zero_grad()


def seconds(work: Callable[[], None]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(what: str, model: Any, rows: list[Row], rounds: int, **options: bool) -> dict[str, Any]:
    """A row of chain tokens a second."""
    found = [
        (seconds(lambda: packed(model, rows)), seconds(lambda: padded(model, rows, **options))) for _ in range(rounds)
    ]
    fast, slow = (min(times) for times in zip(*found, strict=True))
    tokens = sum(len(r.tokens) for r in rows)
    what = f"{what} ({unique_tokens([r.tokens for r in rows]) / tokens:.0%} of the tokens unique)"
    return {"what": what, "ours": tokens / fast, "peer": tokens / slow, "ratio": slow / fast, "unit": "tokens/s"}


def matrix_rate(rounds: int) -> float:
    """Floating-point operations a second of one large float32 product, the best of several."""
    a, b = torch.randn(2048, 1024), torch.randn(1024, 1024)
    return max(2 * 2048 * 1024 * 1024 / seconds(lambda: torch.mm(a, b)) for _ in range(3 * rounds))


def reached(model: Any, rows: list[Row], rate: float) -> float:
    """Operations a second at `rate` chain tokens a second."""
    head = VOCABULARY * model.config.hidden_size
    blocks = (sum(p.numel() for p in model.parameters()) - head) * unique_tokens([r.tokens for r in rows])
    return 6 * (blocks + head * sum(len(r.positions) for r in rows)) * rate / sum(len(r.tokens) for r in rows)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = tiny_llama()
    alone, short, long = (
        make_rows(64, 1, 0, 200, 600),
        make_rows(8, 8, 100, 200, 600),
        make_rows(4, 8, 1000, 1100, 1500),
    )
    packed(model, alone)
    results = [
        compare("one tree against padded rows: nothing shared", model, alone, options.rounds),
        compare("one tree against padded rows: groups of 8 share a prompt of 100", model, short, options.rounds),
        compare("one tree against padded rows: groups of 8 share a prompt of 1000", model, long, options.rounds),
        compare("the same, head at every position: nothing shared", model, alone, options.rounds, every_position=True),
    ]
    ours, possible = reached(model, alone, results[0]["ours"]) / 1e9, matrix_rate(options.rounds) / 1e9
    what = f"operations of the weights against one large product, {options.threads} thread(s)"
    results.append({"what": what, "ours": ours, "peer": possible, "ratio": ours / possible, "unit": "GFLOP/s"})
    for row in results:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
