"""Log-probs equal transformers', whatever the padding, the chunking, the temperature or the adapters."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from learner_fakes import VOCABULARY, tiny_model
from safetensors.torch import save_file

from inspan.errors import ModelError
from inspan.learner import model as module
from inspan.learner.model import Lora, collate, load_model, published_tensors, token_logprobs
from inspan.learner.packing import Row

CPU = torch.device("cpu")


def random_rows(seed: int = 0, count: int = 5):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(rng.integers(3, 30))
        tokens = tuple(int(t) for t in rng.integers(0, VOCABULARY, length))
        rows.append(
            Row(tokens, tuple(sorted(rng.choice(np.arange(1, length), size=length // 2, replace=False).tolist())))
        )
    return rows


def logprobs_by_transformers(model, rows, temperature=1.0):
    """Row by row, without padding, over all positions."""
    found = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0] / temperature
        logp = logits.log_softmax(-1)
        found += [logp[p - 1, row.tokens[p]] for p in row.positions]
    return torch.stack(found)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padded_rows_have_the_log_probs_of_the_sampling_distribution(temperature):
    model, rows = tiny_model(), random_rows()
    logp, entropy = token_logprobs(model, *collate(rows, CPU), temperature=temperature)
    assert torch.allclose(logp, logprobs_by_transformers(model, rows, temperature), atol=1e-5)
    assert entropy.shape == logp.shape
    assert not entropy.requires_grad


def test_entropy_is_that_of_the_distribution_at_each_token():
    model, row = tiny_model(), Row((1, 2, 3, 4), (1, 3))
    _, entropy = token_logprobs(model, *collate([row], CPU))
    p = model(input_ids=torch.tensor([row.tokens])).logits[0].softmax(-1)
    expected = -(p * p.log()).sum(-1)
    assert torch.allclose(entropy, expected[[0, 2]], atol=1e-5)


def test_chunked_vocabulary_gives_the_same_values_and_gradients(monkeypatch):
    rows, gradients, values = random_rows(), [], []
    for limit in (1 << 24, 3 * VOCABULARY):
        monkeypatch.setattr(module, "LOGIT_CHUNK", limit)
        model = tiny_model()
        logp, _ = token_logprobs(model, *collate(rows, CPU))
        (logp * torch.arange(len(logp))).sum().backward()
        values.append(logp.detach())
        gradients.append([p.grad for p in model.parameters()])
    assert torch.allclose(*values, atol=1e-6)
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_and_bfloat16_compute_the_same_function():
    rows = random_rows()
    exact, _ = token_logprobs(tiny_model(), *collate(rows, CPU))
    saved, _ = token_logprobs(tiny_model(checkpointing=True), *collate(rows, CPU))
    coarse, _ = token_logprobs(tiny_model(), *collate(rows, CPU), dtype="bfloat16")
    assert torch.allclose(exact, saved, atol=1e-6)
    assert coarse.dtype == torch.float32
    assert 0 < float((coarse - exact).detach().abs().max()) < 0.5


def test_merged_adapters_equal_the_adapted_model():
    model, rows = tiny_model(lora=Lora(rank=4)), random_rows()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted, _ = token_logprobs(model, *collate(rows, CPU))
    plain = tiny_model(seed=1)
    before, _ = token_logprobs(plain, *collate(rows, CPU))
    missing, unexpected = plain.load_state_dict(published_tensors(model), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    plain.tie_weights()
    merged, _ = token_logprobs(plain, *collate(rows, CPU))
    assert torch.allclose(adapted, merged, atol=1e-5)
    assert not torch.allclose(adapted, before, atol=1e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_published_tensors_are_private_copies_of_every_stored_weight(tied):
    model = tiny_model(tied=tied)
    tensors = published_tensors(model)
    assert ("lm_head.weight" in tensors) is not tied
    before = tensors["model.norm.weight"].clone()
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    assert torch.equal(tensors["model.norm.weight"], before)


def test_a_saved_model_loads_in_float32(tmp_path):
    tiny_model().half().save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_cannot_be_trained_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"broken")
    with pytest.raises(ModelError, match="cannot load"):
        load_model(tmp_path)
    weights = tiny_model().state_dict()
    save_file({k: v for k, v in weights.items() if k not in ("model.norm.weight", "lm_head.weight")}, str(file))
    with pytest.raises(ModelError, match="1 weights are missing"):
        load_model(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        load_model(tmp_path)
