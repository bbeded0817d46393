"""A model of random weights that knows no task, and a recipe whose reward it can still learn: to be brief."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inspan.config import Recipe, load
from inspan.warmstart.tokenizer import save_tokenizer, train_tokenizer

RECIPE = """
name = "brief"
model = "MODEL"
harness = "single"
[tasks]
path = "tasks.jsonl"
[limits]
critical_steps = 3
[sampling]
max_tokens = 24
[[rewards]]
use = "briefness:brief"
[train]
updates = 4
groups = 2
group_size = 4
lr = 1e-3
checkpoint_every = 1
[rollout]
concurrency = 8
[engine]
slots = 16
threads = 1
[eval]
tasks = 2
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama of random weights with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["system user assistant tool", "what is the capital of Niger"] * 20, 330)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    """A user's folder: recipe, reward, tasks."""
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("MODEL", str(model)))
    (tmp_path / "briefness.py").write_text("def brief(rollout):\n    return -len(rollout.answer) / 100\n")
    rows = [{"id": f"t{i}", "prompt": f"say {i}", "answer": str(i)} for i in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.fixture
def recipe(project: Path) -> Recipe:
    """The project's recipe, as loaded."""
    return load(project / "recipe.toml")
