"""The engine computes what transformers computes."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_models import KINDS, drift, make_model, prompt, reference_logits

from inspan.engine.base import SamplingParams
from inspan.engine.torch_engine import TorchEngine
from inspan.engine.weights import ModelSpec, interleave, load_weights
from inspan.errors import ModelError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
async def test_sampled_logprobs_equal_the_transformers_forward_for_ragged_prompts(kind, deterministic):
    model = make_model(kind)
    engine = TorchEngine({"p": model}, slots=5, deterministic=deterministic)
    prompts = [prompt(n, n) for n in (1, 2, 9, 40, 90, 17, 64, 65, 3)]
    params = [SamplingParams(max_tokens=5 + 3 * i, seed=i) for i in range(len(prompts))]
    samples = await asyncio.gather(*(engine.sample("p", p, q) for p, q in zip(prompts, params, strict=True)))
    for p, q, s in zip(prompts, params, samples, strict=True):
        assert len(s.tokens) == q.max_tokens
        assert drift(model, p, s) < 1e-4
    await engine.close()


async def test_greedy_tokens_do_not_depend_on_the_batch(llama):
    engine = TorchEngine({"p": llama}, slots=16)
    prompts = [prompt(5 + 7 * i, 100 + i) for i in range(12)]
    greedy = SamplingParams(max_tokens=20, temperature=0.0, top_logprobs=1)
    together = await asyncio.gather(*(engine.sample("p", p, greedy) for p in prompts))
    for p, s in zip(prompts, together, strict=True):
        alone = await TorchEngine({"p": llama}, slots=1).sample("p", p, greedy)
        assert alone.tokens == s.tokens
        logits = reference_logits(llama, p + s.tokens).log_softmax(-1)
        for i, (token, top) in enumerate(zip(s.tokens, s.top, strict=True)):
            assert token == int(logits[len(p) - 1 + i].argmax())
            assert top[0][0] == token
            assert abs(top[0][1] - float(logits[len(p) - 1 + i, token])) < 1e-4


async def test_a_prompt_longer_than_a_chunk_is_prefilled_in_pieces_with_the_same_result(llama):
    engine = TorchEngine({"p": llama}, slots=4)
    engine._lanes["p"].chunk = 16
    prompts = [prompt(n, n) for n in (70, 33, 16, 5)]
    samples = await asyncio.gather(*(engine.sample("p", p, SamplingParams(8, seed=1)) for p in prompts))
    for p, s in zip(prompts, samples, strict=True):
        assert drift(llama, p, s) < 1e-4
    assert engine.counters.prefilled_tokens == sum(map(len, prompts))
    assert engine.counters.steps >= 8 + 124 // 16


def test_a_saved_model_loads_to_the_same_weights(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    from_files, from_memory = load_weights(tmp_path), load_weights(llama)
    assert from_files.spec == from_memory.spec
    for one, other in zip(from_files.layers, from_memory.layers, strict=True):
        assert torch.equal(one.qkv, other.qkv) and torch.equal(one.down, other.down)


def test_weights_are_a_private_copy(llama):
    model = make_model("llama", seed=3)
    weights = load_weights(model)
    before = [t.clone() for t in (weights.embed, weights.head, weights.norm, weights.layers[0].down)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    after = (weights.embed, weights.head, weights.norm, weights.layers[0].down)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_interleaving_pairs_the_halves_of_each_head():
    assert interleave(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "gpt2"}, "supported: llama, mistral, qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_parameters": None}, "yarn"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding_window"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(llama, change, word):
    with pytest.raises(ModelError, match=word):
        ModelSpec.from_config({**llama.config.to_dict(), **change})


def test_old_style_rope_keys_are_read(llama):
    config = llama.config.to_dict()
    del config["rope_parameters"]
    scaling = {"type": "linear", "factor": 4.0}
    rope = ModelSpec.from_config({**config, "rope_theta": 123.0, "rope_scaling": scaling}).rope
    assert (rope.theta, rope.kind, rope.factor) == (123.0, "linear", 4.0)


def test_missing_files_and_tensors_are_named(llama, tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_weights(tmp_path)
    llama.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="safetensors"):
        load_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ModelError, match="cannot read"):
        load_weights(tmp_path)
    state = dict(llama.state_dict())
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        load_weights((llama.config, state))
    state = dict(llama.state_dict())
    state["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ModelError, match="shape"):
        load_weights((llama.config, state))
