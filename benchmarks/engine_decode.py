"""The embedded engine against `transformers.generate` and against the machine's roofline; episodes: `episodes.py`.

    python benchmarks/engine_decode.py

prints one JSON object a row (`what`, `ours`, `peer`, `ratio`, `unit`), in about a minute. Models are random; both sides
of a row run the same model on the same prompts, in turns, and the best round of each counts. Decoding is timed without
the prompts: the engine has them in its cache, from `generate` the time of a one-token call is taken off.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import inspan  # noqa: F401 (before torch: it sets how OpenMP threads wait)

# isort: split
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inspan.engine.base import SamplingParams
from inspan.engine.torch_engine import TorchEngine
from roofline import decode_floor, gemm_gflops, read_bandwidth

TINY: dict[str, Any] = {
    "vocab_size": 800,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
}


def model(shape: dict[str, Any]) -> Any:
    """A random Llama with tied embeddings."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).eval()


def prompts(count: int, length: int, vocab: int) -> list[tuple[int, ...]]:
    """Random prompts of one length."""
    return [tuple(p) for p in torch.randint(0, vocab, (count, length)).tolist()]


def row(what: str, ours: float, peer: float | None, unit: str, ratio: float | None = None) -> None:
    """Print one result."""
    ratio = ratio if ratio is not None else (ours / peer if peer else None)
    figures = {"ours": ours, "peer": peer, "ratio": ratio}
    rounded = {key: None if x is None else float(f"{x:.4g}") for key, x in figures.items()}
    print(json.dumps({"what": what, **rounded, "unit": unit}), flush=True)


async def engine_seconds(engine: TorchEngine, batch: list[tuple[int, ...]], tokens: int) -> float:
    """Time to sample `tokens` for each prompt, prompts cached."""
    await asyncio.gather(*(engine.sample("p", p, SamplingParams(1, seed=0)) for p in batch))
    begin = time.perf_counter()
    await asyncio.gather(*(engine.sample("p", p, SamplingParams(tokens + 1, seed=i)) for i, p in enumerate(batch)))
    return time.perf_counter() - begin


def generate_seconds(net: Any, batch: list[tuple[int, ...]], tokens: int) -> float:
    """Time that `generate` takes for `tokens` beyond the first."""
    ids = torch.tensor(batch)
    times = []
    for count in (1, tokens + 1):
        begin = time.perf_counter()
        with torch.inference_mode():
            net.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=count,
                max_new_tokens=count, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        times.append(time.perf_counter() - begin)
    return times[1] - times[0]


def decode(name: str, net: Any, *, batch: int, context: int, tokens: int, threads: int, rounds: int) -> float:
    """Rows of decoding speed; returns the engine's seconds per step."""
    torch.set_num_threads(threads)
    given = prompts(batch, context, net.config.vocab_size)
    ours = peer = float("inf")
    for _ in range(rounds):
        torch.set_num_threads(threads)
        ours = min(
            ours, asyncio.run(engine_seconds(TorchEngine({"p": net}, slots=batch, threads=threads), given, tokens))
        )
        torch.set_num_threads(threads)
        peer = min(peer, generate_seconds(net, given, tokens))
    where = f"{name}, batch {batch}, context {context}-{context + tokens}, {threads} thread(s)"
    row(f"decode against transformers.generate: {where}", batch * tokens / ours, batch * tokens / peer, "tokens/s")
    return ours / tokens


def roofline(engine_step: float, net: Any, *, batch: int, context: int, threads: int) -> None:
    """A row with the machine's roofs and the share of them that a decode step reaches."""
    torch.set_num_threads(threads)
    gflops, bandwidth = gemm_gflops(), read_bandwidth()
    floor = decode_floor(TorchEngine({"p": net}).spec("p"), batch, context, gflops, bandwidth)
    roofs = f"{gflops:.0f} GFLOP/s, {bandwidth:.0f} GB/s"
    what = f"decode step against its roofline ({roofs}), batch {batch}, context {context}, {threads} thread(s)"
    row(what, engine_step * 1e3, floor * 1e3, "ms/step", floor / engine_step)


def main() -> None:
    """Print all rows."""
    tiny = model(TINY)
    for threads in (1, 2):
        for context in (128, 512):
            step = decode("tiny Llama", tiny, batch=64, context=context, tokens=64, threads=threads, rounds=2)
            roofline(step, tiny, batch=64, context=context + 32, threads=threads)
    big = model(SMOLLM2)
    decode("SmolLM2-135M shape", big, batch=8, context=128, tokens=12, threads=2, rounds=3)


if __name__ == "__main__":
    main()
