"""The TRL side of `vs_trl.py`: a tiny model, a GRPOTrainer without what Inspan does not do either, and its clock."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch

VOCABULARY, PROMPTS, GROUP = 512, 16, 8


def tiny_llama(seed: int = 0, *, pad: int = 0, end: int = 1, positions: int = 1024) -> Any:
    """0.47 M parameters: d128, 2 layers, a vocabulary of 512."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    return LlamaForCausalLM(config)


def reward(completion: tuple[int, ...] | list[int]) -> float:
    """Share of even ids: dense and cheap, so that it costs neither side anything."""
    return sum(1 for t in completion if t % 2 == 0) / max(1, len(completion))


def trl_trainer(
    directory: str, model: Any, tokenizer: Any, prompts: list[Any], *, completion: int, **changes: Any
) -> Any:
    """A GRPOTrainer on the CPU without gradient checkpointing, logging or saving; `changes` go to its config.

    `callbacks` and `environment_factory` go to the trainer.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    parts = {name: changes.pop(name) for name in ("callbacks", "environment_factory") if name in changes}
    settings: dict[str, Any] = {
        "output_dir": directory,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": completion,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon": 0.2,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "dataloader_pin_memory": False,
        **changes,
    }

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward(ids) for ids in completion_ids]

    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
            processing_class=tokenizer,
            **parts,
        )


class Rate(NamedTuple):
    """Trained tokens a second of wall and of CPU time (medians over updates), and trained tokens an update."""

    wall: float
    cpu: float
    tokens: float


Mark = tuple[float, float, float]
"""Wall time, CPU time, tokens trained so far."""


def mark(tokens: float) -> Mark:
    """Now."""
    return time.perf_counter(), time.process_time(), tokens


def rate_of(marks: list[Mark]) -> Rate:
    """The rate between marks, one an update."""
    pairs = list(itertools.pairwise(marks))
    wall, cpu = (statistics.median((b[2] - a[2]) / (b[i] - a[i]) for a, b in pairs) for i in (0, 1))
    return Rate(wall, cpu, (marks[-1][2] - marks[0][2]) / len(pairs))


def trl_rate(steps: int, make: Callable[..., Any]) -> Rate:
    """The rate of `steps` updates after a first; `make(directory, max_steps=…, callbacks=…)` builds the trainer."""
    from transformers import TrainerCallback

    marks: list[Mark] = []
    trained = [0]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(mark(trained[0]))

    with tempfile.TemporaryDirectory() as directory:
        trainer = make(directory, max_steps=steps + 1, callbacks=[Clock()])
        inner = trainer._compute_loss

        def counting(model: Any, inputs: dict[str, Any]) -> Any:
            trained[0] += int((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum())
            return inner(model, inputs)

        trainer._compute_loss = counting
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
    return rate_of(marks)


def compare(what: str, ours: Callable[[], Rate], theirs: Callable[[], Rate], rounds: int) -> list[dict[str, Any]]:
    """Rows of trained tokens a second, by the clock and by CPU time; rounds alternate, the fastest of each counts.

    `what` may use {ours} and {theirs}, the trained tokens an update: they show that the work is equal.
    """
    found = [(ours(), theirs()) for _ in range(rounds)]
    us, them = ([side[i] for side in found] for i in (0, 1))
    what = what.format(ours=round(us[0].tokens), theirs=round(them[0].tokens))
    rows = []
    for unit, field in (("trained tokens/s", 0), ("trained tokens/CPU s", 1)):
        a, b = max(rate[field] for rate in us), max(rate[field] for rate in them)
        rows.append({"what": what, "ours": a, "peer": b, "ratio": a / b, "unit": unit})
    return rows
