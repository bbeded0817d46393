"""The loop: collect groups, score, credit, update, publish. Contract: an update is one cut.

Between two cuts nothing that was reported can be lost: a line of metrics is written for an update that is in the
learner's weights, and the checkpoint holds weights, optimiser, random states, task cursor, schedule step and the ledger
of rollouts together. What was reported after the last checkpoint is taken back on resume, and trained anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from inspan.config import Recipe
from inspan.credit.registry import BatchCredit, credit_batch
from inspan.engine.base import WeightsRef
from inspan.errors import CheckpointError, InputError
from inspan.learner.checkpoint import latest, load_checkpoint, save_checkpoint
from inspan.learner.learner import Learner, LearnerSettings
from inspan.learner.losses import make_objective
from inspan.learner.model import Lora, load_model, published_tensors
from inspan.learner.optim import OptimSettings
from inspan.learner.store import read_weights
from inspan.parity.fingerprint import Fingerprint
from inspan.parity.watch import Learning, save_fingerprint
from inspan.progress import Progress
from inspan.rewards.detectors import detect, observe
from inspan.rewards.reward_set import RewardSet
from inspan.rollout.dispatcher import Dispatcher, DispatchSettings, Group, next_life
from inspan.rollout.executor import LocalExecutor
from inspan.stopping import finished, run_until_stopped
from inspan.tasks.base import Task
from inspan.tasks.sampler import Sampler, make_sampler, thin_negatives
from inspan.trace.delivery import Delivery, delivery, given_up, leave_out, total
from inspan.trace.records import ChainCredit, Scored
from inspan.trace.store import TraceStore
from inspan.train.environment import make_environment
from inspan.train.evaluate import evaluate_arms, held_out_figures, per_task, write_json
from inspan.train.figures import rollout_success, trajectory, update_figures
from inspan.train.setup import POLICY, Stack, build_stack, roles_at

_log = logging.getLogger("inspan.train")
READ_EVERY = 10  # updates between trajectories that are kept to be read
READ_GROUPS = 3


def run(recipe: Recipe, *, out: Path, resume: bool, progress: Progress, verify: bool = False) -> dict[str, Any]:
    """Train as a recipe says, in the run directory `out`; returns the summary that is written there.

    With `verify` every invariant that can be checked is checked on the way: a breach raises `InvariantBroken`.

    Raises InspanError, and KeyboardInterrupt when a signal stopped it: then every update that was begun is finished and
    saved.
    """
    return run_until_stopped(_run(recipe, out, resume, progress, verify))


async def _run(recipe: Recipe, out: Path, resume: bool, progress: Progress, verify: bool) -> dict[str, Any]:
    environment = make_environment(recipe)
    store = TraceStore(out / "trace.sqlite")
    stack = build_stack(recipe, environment, store, verify=verify)
    try:
        trainer = Trainer(recipe, out, stack, progress)
        if resume:
            await trainer.resume()
        else:
            trainer.save()
        progress.start(recipe, recipe.train.updates, trainer.step)
        await trainer.train()
        return await trainer.conclude()
    finally:
        await stack.close()


@dataclass(slots=True)
class Trainer:
    """The state of a run between two updates. `step` counts updates; it is the learner's version."""

    recipe: Recipe
    out: Path
    stack: Stack
    progress: Progress
    step: int = 0
    wall_s: float = 0.0
    window: list[dict[str, float]] = field(default_factory=list)  # what the hack detectors look at, a row an update
    learner: Learner = field(init=False)
    rewards: RewardSet = field(init=False)
    sampler: Sampler = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    shown: Learning = field(init=False)  # what the harness shows the model: the run's fingerprint
    _draws: random.Random = field(init=False)
    _began: float = field(init=False)
    _saved: int = -1
    _whole: bool = True  # false while the weights are between two updates

    def __post_init__(self) -> None:
        recipe = self.recipe
        self._began = time.monotonic()
        self.learner = make_learner(recipe, self.stack.directory)
        self.rewards = RewardSet.from_recipe(recipe.rewards, python_path=recipe.python_path)
        draws = random.Random(f"tasks {recipe.seed}")
        phases = {"phases": recipe.tasks.phases} if recipe.tasks.phases else {}
        self.sampler = make_sampler(recipe.tasks.sampler, self.stack.environment.train, draws, **phases)
        self._draws = random.Random(f"draws {recipe.seed}")
        self.shown = Learning(Fingerprint(self.stack.setting(recipe.harness)))
        runner = self.stack.runner(recipe.harness, roles_at(recipe.agents, 0.0), watch=self.shown)
        self.dispatcher = Dispatcher(
            LocalExecutor(runner),
            self._next_task,
            _dispatching(recipe),
            seed=recipe.seed,
            store=self.stack.store,
            life=next_life(self.stack.store) if self.stack.store else 0,
        )

    @property
    def share(self) -> float:
        """How much of the run is done, in [0, 1]: what schedules run over."""
        return self.step / self.recipe.train.updates

    def _next_task(self) -> Task | None:
        return self.sampler.draw(1, self.share)[0]

    # ---- training ---------------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """All updates that are left. Whatever ends it early, the finished updates are saved."""
        runner = self.dispatcher.executor.runner  # type: ignore[attr-defined]
        try:
            while self.step < self.recipe.train.updates:
                runner.roles = roles_at(self.recipe.agents, self.share)
                for role in runner.roles:
                    await self.stack.ensure(role.policy)
                await self.update()
                if self.step % self.recipe.train.checkpoint_every == 0:
                    self.save()
        finally:
            self.save()
            await self.dispatcher.close()
            await self.dispatcher.executor.close()  # type: ignore[attr-defined]

    async def update(self) -> None:
        """One update, from rollouts to published weights."""
        started, share = time.monotonic(), self.share
        self.progress.phase("rollouts")
        groups = await self.dispatcher.collect()
        collected = time.monotonic()
        self._demand()
        scored = [await self.rewards.score(group.rollouts, share) for group in groups]
        self._require_rewards(scored)
        metrics: dict[str, Any] = {}
        try:
            await finished(self._cut(groups, scored, share, collected - started, metrics))
            await self.stack.engine.load(POLICY, self.learner.weights())
            every = self.recipe.eval.every
            if every and self.step % every == 0 and self.step < self.recipe.train.updates:
                self.progress.phase("evaluating")
                metrics["held_out"] = await held_out_figures(self.stack, f"every-{self.step}")
        finally:  # an update that is done is reported, whatever ended what follows it
            if metrics and self._whole:
                metrics["seconds"] = time.monotonic() - started
                self._report(metrics)

    async def _cut(
        self,
        groups: Sequence[Group],
        scored: Sequence[Sequence[Scored]],
        share: float,
        seconds: float,
        metrics: dict[str, Any],
    ) -> None:
        """From one cut to the next: once begun it is finished, or fails and leaves nothing that may be saved."""
        self.progress.phase("learning")
        delivered = self._deliver(scored)
        if not self.recipe.train.abandoned:
            scored = [[_without_left(one) for one in group] for group in scored]
        batch = self._credit(scored)
        if self.stack.verifier:
            self.stack.verifier.batch(scored, batch.credits, self.learner)
            self._demand()
        self._whole = False
        learnt = await self._learn(batch, share)
        metrics |= {
            "update": self.step,
            **update_figures(scored, width=self.recipe.limits.width),
            **{k: v for k, v in learnt.items() if k not in ("seconds", "version", "steps")},
            "weights": self.rewards.weights(share),
            "dropped_groups": {str(reason): n for reason, n in batch.dropped.items()},
            **self._rollout_figures(groups, seconds),
            **delivered.figures(),
            "learn_s": learnt["seconds"],
        }
        swarm = len(self.recipe.agents) > 1  # an agent that has nobody to delegate to is not to be judged on it
        kinds = {} if swarm else {"wide": (), "narrow": ()}
        metrics["behaviour"] = observe(scored, batch.credits, entropy=learnt.get("entropy"), **kinds)
        self.window.append(metrics["behaviour"])
        metrics["findings"] = [finding.name for finding in detect(self.window)]
        self._finish(groups, scored, batch)
        self._whole = True

    def _deliver(self, scored: Sequence[Sequence[Scored]]) -> Delivery:
        """The fates of all tokens that the policy sampled; says loudly when some have none."""
        abandoned = self.recipe.train.abandoned
        found = total(delivery(one.rollout, abandoned=abandoned) for group in scored for one in group)
        if found.unexplained:
            _log.error("update %d: %d sampled tokens are neither trained nor excluded", self.step, found.unexplained)
        return found

    def _demand(self) -> None:
        """Under `verify`: raise what is broken."""
        if self.stack.verifier:
            self.stack.verifier.demand()

    def _require_rewards(self, scored: Sequence[Sequence[Scored]]) -> None:
        """Raise when a batch is left without a single reward by its terms: then nothing is ever learned."""
        ended = [one for group in scored for one in group if one.rollout.trainable]
        if not ended or any(one.reward is not None for one in ended):
            return
        silent = [name for name in ended[0].terms if all(one.terms[name] is None for one in ended)]
        raise InputError(
            f"none of {len(ended)} rollouts got a reward",
            where=", ".join(silent) or "rewards",
            hint="mend the term (it must return a number), or mark it `optional = true`, and resume",
        )

    def _credit(self, scored: Sequence[Sequence[Scored]]) -> BatchCredit:
        train, keep = self.recipe.train, self.recipe.tasks.thin_negatives
        params = {"gamma": train.gamma} if train.credit == "gamma" else {}
        kept = None
        if keep < 1.0:
            kept = [thin_negatives([one.reward for one in group], keep, self._draws) for group in scored]
        return credit_batch(train.credit, scored, params, keep=kept)

    async def _learn(self, batch: BatchCredit, share: float) -> dict[str, float]:
        if self.recipe.rollout.mode == "sync":
            return self.learner.update(batch.credits, share)
        return await asyncio.to_thread(self.learner.update, batch.credits, share)  # rollouts go on beside it

    def _rollout_figures(self, groups: Sequence[Group], seconds: float) -> dict[str, Any]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sampled = sum(rollout.metrics.get("sampled_tokens", 0.0) for rollout in rollouts)
        meter = self.dispatcher.meter.report()
        return {
            "rollout_s": seconds,
            "sampled_tokens": sampled,
            "rollout_tokens_per_s": sampled / seconds if seconds > 0 else 0.0,
            "none_share": meter["none_share"],
            "retries": meter["retries"],
            "group_staleness": meter["staleness_mean"],
        }

    def _finish(self, groups: Sequence[Group], scored: Sequence[Sequence[Scored]], batch: BatchCredit) -> None:
        """Enter the update into the records: from here on it is done."""
        ids = [one.rollout.id for group in scored for one in group if one.reward is not None]
        if self.stack.store is not None:
            self.stack.store.save_scored((one for group in scored for one in group), _by_rollout(scored, batch))
            self.stack.store.mark_trained(ids, self.step)
        for group, members in zip(groups, scored, strict=True):
            found = [rollout_success(one.rollout) for one in members if one.reward is not None]
            known = [value for value in found if value is not None]
            if known:
                turns = sum(len(one.rollout.calls) for one in members) / len(members)
                self.sampler.report(group.task.id, sum(known) / len(known), turns=turns)
        if self.step % READ_EVERY == 0:
            self._keep_to_read(scored)
        self.step += 1
        self.dispatcher.advance(self.step)

    def _keep_to_read(self, scored: Sequence[Sequence[Scored]]) -> None:
        """Write the best and the worst rollout of a few groups."""
        rows = []
        for group in scored[:READ_GROUPS]:
            ranked = sorted((one for one in group if one.reward is not None), key=lambda one: one.reward or 0.0)
            rows += [ranked[0], ranked[-1]] if len(ranked) > 1 else ranked
        self._write_trajectories(rows, "training")

    def _write_trajectories(self, rows: Sequence[Scored], arm: str) -> None:
        width = self.recipe.limits.width
        with (self.out / "trajectories.jsonl").open("a", encoding="utf-8") as file:
            for one in rows:
                row = trajectory(one, update=self.step, arm=arm, width=width)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _report(self, metrics: dict[str, Any]) -> None:
        with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics, ensure_ascii=False) + "\n")
        self.progress.update(metrics)

    # ---- keeping ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the last finished update, unless there is one or an update failed half-way."""
        if self._saved == self.step or not self._whole:
            return
        state = {
            "step": self.step,
            "wall_s": self.wall_s + time.monotonic() - self._began,
            "window": self.window,
            "sampler": self.sampler.state(),
            "draws": [self._draws.getstate()[0], list(self._draws.getstate()[1]), self._draws.getstate()[2]],
            "dispatcher": self.dispatcher.state(),
            "fingerprint": self.shown.state(),
        }
        save_fingerprint(self.shown, self.out)
        save_checkpoint(self.out / "checkpoints", self.learner, state, step=self.step)
        self._saved = self.step

    async def resume(self) -> None:
        """Go on from the newest checkpoint; a run that was stopped before its first one begins anew."""
        path = latest(self.out / "checkpoints")
        if path is None:
            if (self.out / "metrics.jsonl").exists():
                what = "updates were reported, but no complete checkpoint is left"
                raise CheckpointError(what, where=str(self.out), hint="start a new run with another --out")
            self._forget_after(0)
            return
        state = load_checkpoint(path, self.learner).state
        self.step = self._saved = int(state["step"])
        self.wall_s = float(state["wall_s"])
        self.window = list(state["window"])
        self.sampler.restore(state["sampler"])
        version, internal, gauss = state["draws"]
        self._draws.setstate((version, tuple(internal), gauss))
        self.dispatcher.restore(state["dispatcher"])
        for difference in self.shown.restore(state["fingerprint"]):
            _log.warning("the run goes on in another harness: %s", difference)
        self._forget_after(self.step)
        if self.step:
            await self.stack.engine.load(POLICY, self.learner.weights())

    def _forget_after(self, step: int) -> None:
        """Take back what was reported of updates that no checkpoint holds: they will be made again."""
        if self.stack.store is not None:
            self.stack.store.rewind(step)
        for name, lasts in (("metrics.jsonl", step), ("trajectories.jsonl", step + 1)):
            path = self.out / name
            if path.exists():
                kept = [
                    line
                    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")
                    if _before(line, lasts)
                ]
                partial = path.with_name(name + ".part")
                partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
                partial.replace(path)

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def conclude(self) -> dict[str, Any]:
        """Publish the weights, evaluate the arms on held-out tasks, and write the summary."""
        weights = self._publish()
        await self.stack.engine.load(POLICY, WeightsRef(self.step, path=str(weights)))
        tables, rollouts = await evaluate_arms(self.stack, dict(self.recipe.eval.arms), self.progress)
        self._demand()
        width = self.recipe.limits.width
        write_json(self.out / "eval.json", {name: per_task(found, width) for name, found in rollouts.items()})
        for name, found in rollouts.items():
            kinds = {rollout.task.kind: rollout for rollout in reversed(found)}
            self._write_trajectories(
                [one for rollout in kinds.values() for one in await self.rewards.score([rollout], 1.0)], name
            )
        summary = {
            "recipe": self.recipe.name,
            "seed": self.recipe.seed,
            "updates": self.step,
            "wall_s": round(self.wall_s + time.monotonic() - self._began, 1),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            **tables,
            "findings": [asdict(finding) for finding in detect(self.window)],
            "fingerprint": self.shown.id,
        }
        if self.stack.verifier:
            summary["verified"] = self.stack.verifier.report()
        write_json(self.out / "summary.json", summary)
        self.progress.finish(summary)
        return summary

    def _publish(self) -> Path:
        """The learner's weights as a directory; one that an interrupted conclusion left is kept if it equals them."""
        path = self.out / "weights" / f"v{self.step:06d}"
        if path.exists():
            try:
                _, tensors = read_weights(path)
                now = published_tensors(self.learner.model)
                if tensors.keys() == now.keys() and all(torch.equal(tensors[name], now[name]) for name in now):
                    return path
            except CheckpointError:
                pass  # damaged: written anew
            shutil.rmtree(path)
        self.learner.save_weights(self.out / "weights", self.step)
        return path


def _by_rollout(scored: Sequence[Sequence[Scored]], batch: BatchCredit) -> dict[str, list[ChainCredit]]:
    """The credits of a batch by the ids of its rollouts."""
    ids = [one.rollout.id for group in scored for one in group]
    found: dict[str, list[ChainCredit]] = {}
    for credit in batch.credits:
        found.setdefault(ids[credit.rollout], []).append(credit)
    return found


def _without_left(one: Scored) -> Scored:
    return replace(one, rollout=leave_out(one.rollout, given_up(one.rollout.nodes)))


def _before(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["update"]) < step
    except (ValueError, KeyError, TypeError):
        return False  # cut off when the run was killed


def make_learner(recipe: Recipe, directory: Path) -> Learner:
    """The learner of a recipe, on the model in `directory`."""
    train = recipe.train
    model = load_model(
        directory, lora=Lora(train.lora.rank, train.lora.alpha, tuple(train.lora.targets)) if train.lora.rank else None
    )
    objective = make_objective(
        train.objective,
        dict(train.objective_params),
        length=train.constant_length,
        aggregation=train.aggregation or None,
        kl_estimator=train.kl.estimator,
        kl_coef=train.kl.coef,
    )
    optim = OptimSettings(
        lr=train.lr,
        betas=train.betas,
        weight_decay=train.weight_decay,
        warmup=train.warmup_updates,
        schedule=train.lr_schedule,
        grad_clip=train.grad_clip,
    )
    settings = LearnerSettings(
        optim=optim,
        epochs=train.epochs,
        minibatches=train.minibatches,
        token_budget=train.token_budget,
        temperature=recipe.sampling.temperature,
        dtype=train.dtype,
        seed=recipe.seed,
    )
    return Learner(model, objective, settings)


def _dispatching(recipe: Recipe) -> DispatchSettings:
    section = recipe.rollout
    return DispatchSettings(
        groups=recipe.train.groups,
        group_size=recipe.train.group_size,
        mode=section.mode,
        concurrency=section.concurrency,
        retries=section.retries,
        max_staleness=section.max_staleness,
        stale=section.stale,
        partial=section.partial,
        deterministic=recipe.deterministic,
    )
