"""The learner's own speed on a CPU, and what was tried to raise it.

    python benchmarks/learner.py [--threads 1] [--rounds 4]

Prints one JSON object a row (`what`, `ours`, `peer`, `ratio`, `unit`). Settings that are compared alternate, and the
fastest of each counts, since the machine may be busy.

- micro-batches of at most `CPU_MICRO_BATCH` tokens against ones of 16,384 (activations stay in the cache);
- rows cut by `plan` against rows in order of arrival (padding);
- the vocabulary projection on trained positions only against all positions;
- the share of the matrix throughput (measured in the same run) that an update reaches: six operations a weight for
  each token in the blocks, and for each trained token in the head.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch

from inspan.learner.model import CPU_MICRO_BATCH, collate, prepare, token_logprobs
from inspan.learner.packing import Row, padded_tokens, plan

VOCABULARY, ROWS = 800, 64


def tiny_llama() -> Any:
    """0.5 M parameters: d128, 2 layers, a vocabulary of 800."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    return prepare(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **more)))


def make_rows() -> list[Row]:
    """Multi-turn chains of 200–600 tokens, of which nearly half were sampled."""
    rng = np.random.default_rng(0)
    rows = []
    for length in rng.integers(200, 600, ROWS).tolist():
        positions = tuple(p for p in range(50, length) if (p // 20) % 2)
        rows.append(Row(tuple(rng.integers(0, VOCABULARY, length).tolist()), positions))
    return rows


def forward_backward(model: Any, rows: list[Row], batches: list[tuple[int, ...]]) -> None:
    """Log-probs of all trained tokens and their gradient, as an update computes them."""
    for batch in batches:
        logp, _ = token_logprobs(model, *collate([rows[i] for i in batch], torch.device("cpu")))
        logp.sum().backward()
    model.zero_grad()


def every_position(model: Any, rows: list[Row], batches: list[tuple[int, ...]]) -> None:
    """The same with logits at every position."""
    for batch in batches:
        tokens, targets = collate([rows[i] for i in batch], torch.device("cpu"))
        logp = model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
        logp[targets[:, 0], targets[:, 1] - 1, tokens[targets[:, 0], targets[:, 1]]].sum().backward()
    model.zero_grad()


def seconds(work: Callable[[], None]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(what: str, ours: Callable[[], None], peer: Callable[[], None], rounds: int, tokens: int) -> dict[str, Any]:
    """A row of processed tokens a second for two ways to do the same work."""
    found = [(seconds(ours), seconds(peer)) for _ in range(rounds)]
    fast, slow = (min(times) for times in zip(*found, strict=True))
    return {"what": what, "ours": tokens / fast, "peer": tokens / slow, "ratio": slow / fast, "unit": "tokens/s"}


def matrix_rate(rounds: int) -> float:
    """Floating-point operations a second of one large float32 product, the best of several."""
    a, b = torch.randn(2048, 1024), torch.randn(1024, 1024)
    work = 2 * 2048 * 1024 * 1024
    return max(work / seconds(lambda: torch.mm(a, b)) for _ in range(3 * rounds))


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, rows = tiny_llama(), make_rows()
    lengths = [len(r.tokens) for r in rows]
    tokens, trained = sum(lengths), sum(len(r.positions) for r in rows)
    planned, large = plan(lengths, CPU_MICRO_BATCH), plan(lengths, 16384)
    arrival = [tuple(range(i, min(i + 4, ROWS))) for i in range(0, ROWS, 4)]
    waste = 1 - tokens / padded_tokens(lengths, arrival), 1 - tokens / padded_tokens(lengths, planned)
    forward_backward(model, rows, planned)

    def ours() -> None:
        forward_backward(model, rows, planned)

    peers = {
        f"micro-batches of {CPU_MICRO_BATCH} against 16384 tokens": lambda: forward_backward(model, rows, large),
        f"rows planned (padding {waste[1]:.0%}) against in order of arrival (padding {waste[0]:.0%})": lambda: (
            forward_backward(model, rows, arrival)
        ),
        "head on trained positions against every position": lambda: every_position(model, rows, planned),
    }
    results = [compare(what, ours, peer, options.rounds, tokens) for what, peer in peers.items()]
    head = VOCABULARY * model.config.hidden_size
    work = 6 * ((sum(p.numel() for p in model.parameters()) - head) * tokens + head * trained)
    reached, possible = work * max(r["ours"] for r in results) / tokens, matrix_rate(options.rounds)
    what = f"operations of the weights against one large product, {options.threads} thread(s)"
    results.append(
        {"what": what, "ours": reached / 1e9, "peer": possible / 1e9, "ratio": reached / possible, "unit": "GFLOP/s"}
    )
    for row in results:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
