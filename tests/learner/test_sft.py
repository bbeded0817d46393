"""The supervised trainer learns, is deterministic, and resumes bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from learner_fakes import VOCABULARY, tiny_model

from inspan.errors import InputError
from inspan.learner.checkpoint import latest, load_checkpoint, save_checkpoint
from inspan.learner.optim import OptimSettings
from inspan.learner.sft import Example, Phase, Trainer


def count_up(rng):
    """A random start, then each token one more than the last; loss on what can be known."""
    start, length = int(rng.integers(VOCABULARY)), int(rng.integers(4, 20))
    return Example(tuple((start + i) % VOCABULARY for i in range(length)), (0.0,) + (1.0,) * (length - 1))


def fixed(count: int = 7):
    return [Example(tuple(range(i, i + 5)), (0.0, 0.0, 1.0, 0.5, 1.0)) for i in range(count)]


def trainer(*, token_budget=8192, steps=6, model=None):
    phases = [
        Phase("drawn", count_up, steps, 60, OptimSettings(lr=3e-3, warmup=2)),
        Phase("none", fixed(), 0, 60),
        Phase("fixed", fixed(), steps, 12, OptimSettings(lr=1e-3, schedule="cosine", weight_decay=0.1)),
    ]
    return Trainer(model or tiny_model(), phases, seed=3, token_budget=token_budget)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_it_learns_what_the_examples_show():
    held_out = [count_up(np.random.default_rng(i)) for i in range(1000, 1010)]
    run = Trainer(tiny_model(), [Phase("p", count_up, 150, 200, OptimSettings(lr=1e-2))])
    before = run.evaluate(held_out)
    losses = [metrics["loss"] for metrics in run.run()]
    after = run.evaluate(held_out)
    assert run.finished and len(losses) == 150
    assert after["loss"] < 0.1 < 2 < before["loss"]
    assert after["perplexity"] == pytest.approx(math.exp(after["loss"]))


def test_phases_run_in_turn_with_their_own_schedules_and_batches():
    metrics = list(trainer(steps=4).run())
    assert [m["phase"] for m in metrics] == [0.0] * 4 + [2.0] * 4
    assert [m["step"] for m in metrics] == [float(i) for i in range(1, 9)]
    assert metrics[0]["lr"] == pytest.approx(1.5e-3) and metrics[1]["lr"] == pytest.approx(3e-3)
    assert metrics[4]["lr"] > metrics[7]["lr"]
    assert all(m["tokens"] <= 60 for m in metrics[:4]) and all(m["tokens"] == 10 for m in metrics[4:])


def test_a_fixed_set_is_seen_once_an_epoch_in_a_new_order():
    phase = Phase("p", fixed(6), 6, 10)
    run = Trainer(tiny_model(), [phase])
    seen = [example.tokens[0] for _ in range(6) for example in run._batch(phase)]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != seen[6:]


def test_the_token_budget_does_not_change_the_result():
    whole, cut = trainer(), trainer(token_budget=20)
    for a, b in zip(whole.run(), cut.run(), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert torch.allclose(weights(whole), weights(cut), atol=1e-4)


def test_weights_scale_the_loss_and_context_has_none():
    example = Example((1, 2, 3, 4), (0.0, 0.0, 2.0, 1.0))
    run = Trainer(tiny_model(), [Phase("p", [example], 1, 10)])
    logp = run.model(input_ids=torch.tensor([example.tokens])).logits[0].log_softmax(-1)
    expected = -(2 * logp[1, 3] + logp[2, 4]) / 3
    assert run.step()["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("stop", [3, 6, 9])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, stop):
    straight = trainer()
    for _ in straight.run():
        pass
    first = trainer()
    for _ in range(stop):
        first.step()
    save_checkpoint(tmp_path, first, {}, step=stop)
    resumed = trainer(model=tiny_model(seed=5))
    load_checkpoint(latest(tmp_path), resumed)
    for _ in resumed.run():
        pass
    assert torch.equal(weights(straight), weights(resumed))


@pytest.mark.parametrize(
    "example", [((1, 2), (0.0,)), ((1, 2), (1.0, 1.0)), ((1, 2), (0.0, -1.0)), ((1, 2), (0.0, 0.0)), ((), ())]
)
def test_an_example_that_cannot_be_trained_on_is_refused(example):
    with pytest.raises(InputError):
        Example(*example)


def test_empty_phases_are_refused():
    with pytest.raises(InputError, match="'p'"):
        Trainer(tiny_model(), [Phase("p", [], 1, 10)])
    with pytest.raises(InputError):
        Trainer(tiny_model(), [])
    with pytest.raises(InputError):
        Trainer(tiny_model(), [Phase("p", fixed(), 1, 10)]).evaluate([])
