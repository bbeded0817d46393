"""Every objective equals a scalar-loop reference, value and gradient, whole and in micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive_objectives import gspo_loss_and_gradient, loss_and_gradient

from inspan.errors import RecipeError
from inspan.learner.losses import (
    AGGREGATIONS,
    OBJECTIVES,
    batch_loss,
    describe,
    kl_terms,
    make_objective,
    sequence_log_ratio,
)
from inspan.learner.objectives import TokenBatch

PARAMS = {
    "grpo": {"eps": 0.2, "eps_high": 0.3},
    "dr_grpo": {"eps": 0.2},
    "kimi": {"alpha": 0.6, "beta": 1.7, "tau": 0.05},
    "cispo": {"low": 0.4, "high": 1.8},
    "tis": {"cap": 1.5, "eps": 0.2},
    "icepop": {"alpha": 0.5, "beta": 1.6, "eps": 0.2},
}
LENGTH = 16.0
logp = st.floats(-4.0, -0.01)


@st.composite
def token_lists(draw, uniform: bool = False):
    """Tokens of a few groups × rollouts, interleaved; `uniform`: one advantage and weight a rollout."""
    tokens = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 3))):
            rollout = len({t["rollout"] for t in tokens})
            advantage, weight = draw(st.floats(-2, 2)), draw(st.sampled_from([0.5, 1.0, 2.0]))
            for _ in range(draw(st.integers(1, 5))):
                behaviour = draw(logp)
                token = {"group": group * 7, "rollout": rollout, "advantage": advantage, "weight": weight}
                token |= {"behaviour": behaviour, "new": behaviour + draw(st.floats(-1, 1))}
                token |= {"old": behaviour + draw(st.floats(-1, 1)), "reference": draw(logp)}
                if not uniform:
                    token |= {"advantage": draw(st.floats(-2, 2)), "weight": draw(st.sampled_from([0.5, 1.0, 2.0]))}
                tokens.append(token)
    return draw(st.permutations(tokens))


def tensors(tokens):
    """(logp with gradient, batch) in float64."""

    def column(name):
        kind = torch.int64 if name in ("group", "rollout") else torch.float64
        return torch.tensor([t[name] for t in tokens], dtype=kind)

    names = ("behaviour", "advantage", "weight", "rollout", "group", "old", "reference")
    return column("new").requires_grad_(), TokenBatch(**{n: column(n) for n in names})


def far_from_bounds(tokens):
    """No ratio on an edge, where rounding may decide on which side it lies."""
    edges = (0.4, 0.5, 0.6, 0.8, 1.2, 1.3, 1.5, 1.6, 1.7, 1.8)
    pairs = (("new", "behaviour"), ("new", "old"), ("old", "behaviour"))
    ratios = [math.exp(t[a] - t[b]) for t in tokens for a, b in pairs]
    return all(abs(r - e) > 1e-9 for r in ratios for e in edges)


def run(objective, tokens, parts):
    """Loss and gradient of the batch, computed in micro-batches of the given token indices."""
    new, batch = tensors(tokens)
    scale = objective.scales(batch)
    if objective.needs_sequence:
        from dataclasses import replace

        batch = replace(batch, sequence=sequence_log_ratio(new, batch))
    total = 0.0
    for part in parts:
        index = torch.tensor(part)
        loss, _ = batch_loss(objective, new[index], batch.select(index), scale[index])
        loss.backward()
        total += float(loss.detach())
    assert new.grad is not None
    return total, new.grad.tolist()


@pytest.mark.parametrize("name", list(PARAMS))
@given(
    tokens=token_lists(),
    aggregation=st.sampled_from(AGGREGATIONS),
    kl=st.tuples(st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([0.0, 0.3])),
    cut=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_scalar_reference_whole_and_in_micro_batches(name, tokens, aggregation, kl, cut):
    assume(far_from_bounds(tokens))
    objective = make_objective(
        name, PARAMS[name], aggregation=aggregation, length=LENGTH, kl_estimator=kl[0], kl_coef=kl[1]
    )
    expected, gradient = loss_and_gradient(name, tokens, PARAMS[name], aggregation, LENGTH, kl)
    everything = list(range(len(tokens)))
    for parts in ([everything], [everything[i : i + cut] for i in range(0, len(tokens), cut)]):
        total, found = run(objective, tokens, parts)
        assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert found == pytest.approx(gradient, rel=1e-9, abs=1e-9)


@given(tokens=token_lists(uniform=True), aggregation=st.sampled_from(AGGREGATIONS), cut=st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_gspo_is_the_geometric_mean_over_the_rollout_also_across_micro_batches(tokens, aggregation, cut):
    params = {"eps": 0.1, "eps_high": 0.15}
    objective = make_objective("gspo", params, aggregation=aggregation, length=LENGTH)
    expected, gradient = gspo_loss_and_gradient(tokens, params, aggregation, LENGTH)
    everything = list(range(len(tokens)))
    for parts in ([everything], [everything[i : i + cut] for i in range(0, len(tokens), cut)]):
        total, found = run(objective, tokens, parts)
        assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert found == pytest.approx(gradient, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_on_policy_every_objective_has_the_plain_policy_gradient(name):
    tokens = [
        {"group": i // 4, "rollout": i // 2, "advantage": (-1.0) ** (i // 2), "weight": 1.0}
        | {k: -0.5 - 0.1 * i for k in ("behaviour", "new", "old", "reference")}
        for i in range(8)
    ]
    _, gradient = run(make_objective(name, aggregation="token"), tokens, [range(8)])
    assert gradient == pytest.approx([-t["advantage"] / 8 for t in tokens])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [math.log(2.5), math.log(0.3)])
def test_kimi_outside_the_band_keeps_only_the_log_ratio_penalty(advantage, log_ratio):
    token = {"group": 0, "rollout": 0, "advantage": advantage, "weight": 1.0, "behaviour": -1.0}
    token |= {"new": -1.0 + log_ratio, "old": -1.0, "reference": -1.0}
    _, gradient = run(make_objective("kimi", {"tau": 0.25}), [token], [[0]])
    assert gradient == pytest.approx([2 * 0.25 * log_ratio])


def test_stats_say_which_tokens_were_cut_and_which_lost_their_gradient():
    ratios = [0.5, 1.0, 1.5, 1.5]
    advantages = [1.0, 1.0, 1.0, -1.0]
    tokens = [
        {"group": 0, "rollout": 0, "advantage": a, "weight": 1.0, "behaviour": -1.0, "new": -1.0 + math.log(r)}
        | {"old": -1.0, "reference": -1.0}
        for r, a in zip(ratios, advantages, strict=True)
    ]
    new, batch = tensors(tokens)
    terms = make_objective("grpo").terms(new, batch)
    assert terms.clipped.tolist() == [True, False, True, True]
    assert terms.masked.tolist() == [False, False, True, False]
    assert terms.ratio.tolist() == pytest.approx(ratios)
    kept = make_objective("cispo", {"high": 1.2}).terms(new, batch)
    assert kept.clipped.tolist() == [False, False, True, True]
    assert not kept.masked.any()


def test_an_absurd_outlier_stays_finite():
    token = {"group": 0, "rollout": 0, "advantage": 0.0, "weight": 1.0, "behaviour": -500.0, "new": -0.1}
    token |= {"old": -500.0, "reference": -500.0}
    for name in OBJECTIVES:
        total, gradient = run(make_objective(name), [token], [[0]])
        assert math.isfinite(total) and math.isfinite(gradient[0])


def test_k1_and_k3_have_the_kl_divergence_as_their_mean():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl_terms(estimator, p.log(), q.log())).sum()) == pytest.approx(exact)
    assert float(kl_terms("k2", p.log(), p.log()).sum()) == 0.0


def test_splitting_a_rollout_into_more_chains_changes_nothing():
    """A rollout counts once however many chains it has: only the ids matter, not the rows."""
    tokens = [
        {"group": 0, "rollout": r, "advantage": 1.0 - r, "weight": 1.0, "behaviour": -1.0}
        | {"new": -0.9, "old": -1.0, "reference": -1.0}
        for r in (0, 0, 0, 1)
    ]
    _, batch = tensors(tokens)
    assert make_objective("grpo").scales(batch).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert make_objective("kimi").scales(batch).tolist() == pytest.approx([1 / 4] * 4)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"name": "kimy"}, "kimi"),
        ({"name": "kimi", "params": {"alfa": 1.0}}, "alpha"),
        ({"name": "kimi", "aggregation": "tokens"}, "group_tokens"),
        ({"name": "kimi", "kl_estimator": "k4"}, "k1"),
        ({"name": "kimi", "kl_coef": -1.0}, "≥ 0"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_known_one(kwargs, expected):
    with pytest.raises(RecipeError, match=expected):
        make_objective(**kwargs)


def test_describe_resolves_defaults():
    found = describe(make_objective("kimi", {"tau": 0.5}))
    assert found["params"] == {"alpha": 0.5, "beta": 2.0, "tau": 0.5}
    assert found["aggregation"] == "group_tokens"
