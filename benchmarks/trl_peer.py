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
from typing import Any

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


def trl_rate(steps: int, make: Callable[..., Any]) -> tuple[float, float]:
    """Trained tokens a second (median over `steps` updates after a first) and trained tokens an update.

    `make(directory, max_steps=…, callbacks=…)` builds the trainer.
    """
    from transformers import TrainerCallback

    marks: list[tuple[float, int]] = []
    trained = [0]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), trained[0]))

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
    pairs = list(itertools.pairwise(marks))
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs), (marks[-1][1] - marks[0][1]) / len(pairs)
