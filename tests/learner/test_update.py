"""What an update does to a policy, and that cutting it into micro-batches does not change it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_fakes import chain_of, make_credit, make_credits, model_logprobs, tiny_model, with_logprobs

from inspan.errors import InspanError, RecipeError
from inspan.learner.learner import Learner, LearnerSettings
from inspan.learner.losses import OBJECTIVES, make_objective
from inspan.learner.model import Lora
from inspan.learner.optim import OptimSettings, learning_rate


def learner(objective="kimi", model=None, *, lr=1e-3, optim=None, kl=0.0, estimator="k1", aggregation=None, **settings):
    made = make_objective(objective, aggregation=aggregation, kl_coef=kl, kl_estimator=estimator)
    settings = LearnerSettings(optim=OptimSettings(lr=lr, **(optim or {})), **settings)
    return Learner(model or tiny_model(), made, settings, clock=lambda: 0.0)


def weights_of(learner):
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def mean_logprob(model, credit):
    values = model_logprobs(model, credit)
    return sum(values) / sum(credit.chain.trained)


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_what_was_rewarded_becomes_likelier_and_the_rest_less(objective):
    rng, model = np.random.default_rng(0), tiny_model()
    credits = [make_credit(rng, rollout=i, group=0, length=16, advantage=a) for i, a in enumerate((1.0, -1.0))]
    credits = [with_logprobs(c, model_logprobs(model, c)) for c in credits]
    before = [mean_logprob(model, c) for c in credits]
    trainer = learner(objective, model, lr=3e-3)
    for _ in range(4):
        trainer.update(credits, 0.0)
        credits = [with_logprobs(c, model_logprobs(model, c)) for c in credits]  # on-policy again
    after = [mean_logprob(model, c) for c in credits]
    assert after[0] > before[0] and after[1] < before[1]


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_the_token_budget_changes_the_micro_batches_but_not_the_update(objective):
    results = []
    for budget in (10_000, 90, 1):
        model = tiny_model()
        credits = make_credits(on_policy=tiny_model(seed=0))
        rng = np.random.default_rng(1)
        credits = [
            with_logprobs(
                c,
                [p + 0.1 * rng.normal() if t else 0.0 for p, t in zip(c.chain.logprobs, c.chain.trained, strict=True)],
            )
            for c in credits
        ]
        trainer = learner(objective, model, kl=0.05, token_budget=budget, minibatches=2, lr=1e-4)
        results.append((trainer.update(credits, 0.0), weights_of(trainer)))
    (whole, weights), *others = results
    for metrics, found in others:
        for name in ("loss", "grad_norm", "entropy", "ratio_max", "clip_share", "kl_reference", "trained_tokens"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
        assert torch.allclose(found, weights, atol=2e-6)
    assert others[1][0]["processed_tokens"] > whole["processed_tokens"]  # alone, rows share no prefix


def test_each_trained_token_is_counted_once_an_epoch_and_forks_are_reported():
    credits = make_credits()
    first = credits[0]
    nothing = tuple(0.0 for _ in first.weights)
    context = replace(first, weights=nothing, advantages=nothing)  # a chain without trained tokens is not processed
    long, part = (1, 2, 3, 4, 5, 6), (1, 2, 3, 4)
    forks = [chain_of(long, trained=range(3, 6)), chain_of(part, trained=range(3, 4), rollout=1)]
    metrics = learner("kimi", epochs=2, minibatches=3).update([*credits, context, *forks], 0.0)
    trained = sum(sum(c.chain.trained) for c in credits) + 3 + 1
    assert metrics["trained_tokens"] == trained
    assert metrics["steps"] == 6
    assert metrics["unique_tokens"] <= metrics["chain_tokens"] - len(part)
    assert 2 * metrics["unique_tokens"] <= metrics["processed_tokens"] <= 2 * metrics["chain_tokens"]


def test_minibatches_keep_groups_whole_and_cover_every_row_once():
    trainer = learner("kimi", minibatches=3)
    batch = trainer._flatten(make_credits(groups=4))
    for epoch in range(3):
        parts = trainer._minibatches(batch, epoch)
        assert sorted(i for part in parts for i in part) == list(range(len(batch.rows)))
        groups = [set(batch.flat.group[batch.tokens_of(part)].tolist()) for part in parts]
        assert len(parts) == 3 and not set.intersection(*groups)
    assert trainer._minibatches(batch, 0) != trainer._minibatches(batch, 1)
    few = learner("gspo", minibatches=3)
    batch = few._flatten(make_credits(groups=1))
    rollouts = [set(batch.flat.rollout[batch.tokens_of(part)].tolist()) for part in few._minibatches(batch, 0)]
    assert len(rollouts) == 3 and not set.intersection(*rollouts)


def test_equal_inputs_give_equal_weights_bit_for_bit():
    runs = []
    for _ in range(2):
        trainer = learner("tis", minibatches=2, epochs=2, token_budget=64)
        for step in range(3):
            trainer.update(make_credits(step), 0.0)
        runs.append(weights_of(trainer))
    assert torch.equal(*runs)


def test_chains_without_advantage_are_skipped_only_where_their_loss_is_zero():
    flat = [replace(c, advantages=tuple(0.0 for _ in c.advantages)) for c in make_credits()]
    skipping = learner("grpo")
    before = weights_of(skipping)
    metrics = skipping.update(flat, 0.0)
    assert metrics["processed_tokens"] == 0 and metrics["trained_tokens"] > 0
    assert torch.equal(weights_of(skipping), before)
    pulling = learner("kimi")  # off-policy: τ(log ρ)² pulls towards the behaviour policy
    assert pulling.update(flat, 0.0)["grad_norm"] > 0
    held = learner("grpo", kl=0.1, optim={"schedule": "constant"})
    assert held.update(flat, 0.0)["processed_tokens"] > 0


def test_skipped_chains_still_count_in_the_normaliser():
    rng = np.random.default_rng(0)
    credits = [make_credit(rng, rollout=i, group=0, length=16, advantage=a) for i, a in enumerate((1.0, 0.0))]
    both = learner("cispo").update(credits, 0.0)["grad_norm"]
    alone = learner("cispo").update(credits[:1], 0.0)["grad_norm"]
    assert both == pytest.approx(alone / 2, rel=1e-5)


def test_k1_pulls_back_to_the_reference_policy():
    drifts = []
    for coef in (1e-9, 5.0):
        trainer = learner("dr_grpo", tiny_model(), kl=coef, lr=2e-3, aggregation="token")
        credits = make_credits(groups=1, on_policy=trainer.model)
        for _ in range(12):
            metrics = trainer.update(credits, 0.0)
            credits = [with_logprobs(c, model_logprobs(trainer.model, c)) for c in credits]
        drifts.append(abs(metrics["kl_reference"]))
    assert drifts[1] < drifts[0] / 2


def test_without_a_coefficient_no_reference_pass_is_paid_for():
    metrics = learner("dr_grpo").update(make_credits(), 0.0)
    assert "kl_reference" not in metrics and metrics["processed_tokens"] == metrics["unique_tokens"]


def test_adapters_use_the_unadapted_model_as_reference():
    model = tiny_model(lora=Lora(rank=2))
    trainer = learner("kimi", model, kl=0.1)
    credits = make_credits(on_policy=model)
    assert trainer.update(credits, 0.0)["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert abs(trainer.update(credits, 0.0)["kl_reference"]) > 1e-5
    assert not [n for n in trainer.weights().tensors if "lora" in n]


def test_the_version_counts_updates_and_staleness_is_measured_against_it():
    trainer = learner()
    assert trainer.update([], 0.0)["trained_tokens"] == 0
    trainer.update(make_credits(), 0.0)
    metrics = trainer.update(make_credits(), 0.0)  # sampled at version 0, trained at version 2
    assert (trainer.version, metrics["version"]) == (3, 3.0)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.0, 2.0)
    assert trainer.weights().version == 3


def test_on_policy_ratios_are_one_and_a_temperature_mismatch_shows():
    model = tiny_model()
    credits = make_credits(on_policy=model)
    metrics = learner("kimi", model).update(credits, 0.0)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5) and metrics["logp_gap"] < 1e-5
    model = tiny_model()
    assert learner("kimi", model, temperature=0.5).update(credits, 0.0)["logp_gap"] > 0.1
    credits = [with_logprobs(c, model_logprobs(model, c, 0.5)) for c in credits]
    model = tiny_model()
    credits = [with_logprobs(c, model_logprobs(model, c, 0.5)) for c in credits]
    assert learner("kimi", model, temperature=0.5).update(credits, 0.0)["logp_gap"] < 1e-5


def test_a_non_finite_step_changes_nothing_is_counted_and_at_last_raises():
    trainer = learner("cispo", optim={"max_bad_steps": 3})
    good = make_credits()
    bad = [replace(c, advantages=tuple(math.nan if t else 0.0 for t in c.chain.trained)) for c in good]
    before = weights_of(trainer)
    assert trainer.update(bad, 0.0)["skipped_total"] == 1
    assert torch.equal(weights_of(trainer), before)
    trainer.update(bad, 0.0)
    assert trainer.update(good, 0.0)["skipped_total"] == 2  # a good step starts the count anew
    assert not torch.equal(weights_of(trainer), before)
    trainer.update(bad, 0.0)
    trainer.update(bad, 0.0)
    with pytest.raises(InspanError, match="3 steps in a row"):
        trainer.update(bad, 0.0)


def test_gradient_clipping_bounds_the_step_and_reports_the_norm_before():
    credits = [replace(c, advantages=tuple(1e3 * a for a in c.advantages)) for c in make_credits()]
    assert learner("cispo", optim={"grad_clip": 0.5}).update(credits, 0.0)["grad_norm"] > 10


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1.0, 1.0, 1.0]), ("linear", [0.5, 0.75, 0.5, 0.1]), ("cosine", [0.5, 0.868, 0.55, 0.1])],
)
def test_learning_rate_warms_up_and_falls_with_progress(schedule, expected):
    floor = {"linear": 0.0, "cosine": 0.1}.get(schedule, 0.0)
    settings = OptimSettings(lr=1.0, warmup=2, schedule=schedule, floor=floor)
    points = [(0, 0.0), (1, 0.25), (2, 0.5), (3, 1.0 if schedule != "linear" else 0.9)]
    assert [learning_rate(settings, d, p) for d, p in points] == pytest.approx(expected, abs=1e-3)


def test_decay_spares_norms():
    trainer = learner("grpo", optim={"weight_decay": 0.5}, lr=0.1)
    decays = {
        group["weight_decay"]: {p.dim() for p in group["params"]} for group in trainer.optimiser.adam.param_groups
    }
    assert decays == {0.5: {2}, 0.0: {1}}


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"epochs": 0}, {"dtype": "float16"}, {"token_budget": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(RecipeError):
        LearnerSettings(**settings)
    with pytest.raises(RecipeError):
        OptimSettings(schedule="stairs")
