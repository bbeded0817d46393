"""`--verify` in a run: it passes on what Inspan makes, and stops a run whose record is broken."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from starting import Silent

from inspan.config import Recipe, load
from inspan.engine.witness import CALLER, WitnessEngine
from inspan.errors import InvariantBroken
from inspan.gateway.exchange import Exchange
from inspan.trace.store import TraceStore
from inspan.train import evaluate, run
from inspan.train.verify import Verifier


def train(recipe: Recipe, out: Path) -> dict:
    out.mkdir(exist_ok=True)
    return run(recipe, out=out, resume=False, progress=Silent(), verify=True)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_is_verified(project: Path, tmp_path: Path, mode: str) -> None:
    recipe = load(
        project / "recipe.toml", [f'rollout.mode="{mode}"', f"rollout.partial={str(mode == 'async').lower()}"]
    )
    checked = train(recipe, tmp_path / "out")["verified"]
    assert checked["rollouts"] >= 4 * 8 and checked["answers"] >= 4 * 8
    assert checked["logprobs"] > 0 and checked["tokens"] >= checked["logprobs"]
    again = evaluate(recipe, run=tmp_path / "out", progress=Silent(), verify=True)
    assert again["verified"]["rollouts"] == 2


def wrong(attribute: str, change):
    """An engine's answer that is recorded otherwise than it was given."""
    commit = Exchange._commit

    async def committing(self, flight, sample, message, calls, finish):
        given = getattr(sample, attribute)
        await commit(self, flight, dataclasses.replace(sample, **{attribute: change(given)}), message, calls, finish)

    return committing


@pytest.mark.parametrize(
    ("attribute", "change", "expected"),
    [
        ("tokens", lambda given: (*given[:-1], given[-1] ^ 1), "as sampled: the engine saw"),
        ("logprobs", lambda given: (given[0] - 1.0, *given[1:]), "as sampled: its logprobs differ"),
        ("versions", lambda given: tuple(one + 1 for one in given), "as sampled: its versions differ"),
    ],
)
def test_a_record_that_is_not_what_was_sampled_stops_the_run(
    recipe: Recipe, tmp_path: Path, monkeypatch, attribute: str, change, expected: str
) -> None:
    monkeypatch.setattr(Exchange, "_commit", wrong(attribute, change))
    with pytest.raises(InvariantBroken, match=expected):
        train(recipe, tmp_path / "out")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_logprobs_of_another_context_are_found_by_computing_them_again(
    recipe: Recipe, tmp_path: Path, monkeypatch
) -> None:
    class Lying(WitnessEngine):
        """Its engine gives log-probs that are not those of the context."""

        async def sample(self, policy, prompt, params, watch=None):
            made = await super().sample(policy, prompt, params, watch)
            shifted = dataclasses.replace(made, logprobs=tuple(one - 0.1 for one in made.logprobs))
            last = self._served[CALLER.get()].pop()
            self._served[CALLER.get()].append(dataclasses.replace(last, logprobs=shifted.logprobs))
            return shifted

    monkeypatch.setattr("inspan.train.setup.WitnessEngine", Lying)
    with pytest.raises(
        InvariantBroken, match=r"sampled in this context: computed again, a log-prob differs by 0\.[01]"
    ):
        train(recipe, tmp_path / "out")


def test_an_answer_that_ends_before_its_call_is_on_disk_stops_the_run(
    recipe: Recipe, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(TraceStore, "has_call", lambda self, rollout, call: False)
    with pytest.raises(InvariantBroken, match="recorded before answered"):
        train(recipe, tmp_path / "out")


def test_a_rollout_that_is_learned_twice_stops_the_run(recipe: Recipe, tmp_path: Path, monkeypatch) -> None:
    batch = Verifier.batch
    kept = []

    def repeated(self, scored, credits, learner):
        kept.append(scored)
        batch(self, kept[0], credits, learner)

    monkeypatch.setattr(Verifier, "batch", repeated)
    with pytest.raises(InvariantBroken, match="learned once: the rollout is in a second batch"):
        train(recipe, tmp_path / "out")
