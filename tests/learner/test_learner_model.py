"""Log-probs equal transformers', whatever prefixes are shared, the chunking, the temperature or the adapters."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from learner_fakes import VOCABULARY, tiny_model
from safetensors.torch import save_file

from inspan.errors import ModelError
from inspan.learner import model as module
from inspan.learner.model import Lora, load_model, published_tensors, token_logprobs
from inspan.learner.packing import Row, pack


def random_rows(seed: int = 0, count: int = 9):
    """Rows of which most go on from a prefix of an earlier one, at every depth."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(count):
        shared = rows[int(rng.integers(len(rows)))].tokens[: int(rng.integers(30))] if rows else ()
        tokens = (*shared, *rng.integers(0, VOCABULARY, int(rng.integers(3, 30))).tolist())
        chosen = rng.choice(np.arange(1, len(tokens)), size=len(tokens) // 2, replace=False)
        rows.append(Row(tokens, tuple(sorted(chosen.tolist()))))
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
def test_packed_rows_have_the_log_probs_of_the_sampling_distribution(temperature):
    model, rows = tiny_model(), random_rows()
    assert len(pack(rows).tokens) < sum(len(r.tokens) for r in rows)
    logp, entropy = token_logprobs(model, pack(rows), temperature=temperature)
    assert torch.allclose(logp, logprobs_by_transformers(model, rows, temperature), atol=1e-5)
    assert entropy.shape == logp.shape
    assert not entropy.requires_grad


def test_packing_gives_the_gradients_of_the_rows_alone():
    gradients = []
    for together in (True, False):
        model, rows = tiny_model(), random_rows()
        for part in [rows] if together else [[row] for row in rows]:
            logp, _ = token_logprobs(model, pack(part))
            logp.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Mistral", "GPT2"])
def test_other_architectures_pack_the_same(kind):
    import transformers

    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None, "head_dim": 8}
    if kind == "GPT2":
        shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = module.prepare(getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config))
    rows = random_rows()
    logp, _ = token_logprobs(model, pack(rows))
    assert torch.allclose(logp, logprobs_by_transformers(model, rows), atol=1e-5)


def test_a_model_that_was_not_prepared_is_refused():
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="not prepared"):
        token_logprobs(model, pack(random_rows()))


def test_windowed_attention_is_refused():
    import transformers

    config = transformers.MistralConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, sliding_window=8)
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 1, 4, 2
    with pytest.raises(ModelError, match="full attention"):
        module.prepare(transformers.MistralForCausalLM(config))


def test_entropy_is_that_of_the_distribution_at_each_token():
    model, row = tiny_model(), Row((1, 2, 3, 4), (1, 3))
    _, entropy = token_logprobs(model, pack([row]))
    p = model(input_ids=torch.tensor([row.tokens])).logits[0].softmax(-1)
    expected = -(p * p.log()).sum(-1)
    assert torch.allclose(entropy, expected[[0, 2]], atol=1e-5)


def test_chunked_vocabulary_gives_the_same_values_and_gradients(monkeypatch):
    rows, gradients, values = random_rows(), [], []
    for limit in (1 << 24, 3 * VOCABULARY):
        monkeypatch.setattr(module, "LOGIT_CHUNK", limit)
        model = tiny_model()
        logp, _ = token_logprobs(model, pack(rows))
        (logp * torch.arange(len(logp))).sum().backward()
        values.append(logp.detach())
        gradients.append([p.grad for p in model.parameters()])
    assert torch.allclose(*values, atol=1e-6)
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_and_bfloat16_compute_the_same_function():
    rows = random_rows()
    exact, _ = token_logprobs(tiny_model(), pack(rows))
    saved, _ = token_logprobs(tiny_model(checkpointing=True), pack(rows))
    coarse, _ = token_logprobs(tiny_model(), pack(rows), dtype="bfloat16")
    assert torch.allclose(exact, saved, atol=1e-6)
    assert coarse.dtype == torch.float32
    assert 0 < float((coarse - exact).detach().abs().max()) < 0.5


def test_merged_adapters_equal_the_adapted_model():
    model, rows = tiny_model(lora=Lora(rank=4)), random_rows()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted, _ = token_logprobs(model, pack(rows))
    plain = tiny_model(seed=1)
    before, _ = token_logprobs(plain, pack(rows))
    missing, unexpected = plain.load_state_dict(published_tensors(model), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    plain.tie_weights()
    merged, _ = token_logprobs(plain, pack(rows))
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
