"""The sections of a recipe. Contract: plain validated data; imports neither torch nor any other room.

Unknown keys fail, types are strict (a quoted number is not a number), and every number has its bounds. A description
says where a default comes from: [P] stated by a paper's authors, [C] found in code, [D] our own choice where every
source is silent. The descriptions are the source of `docs/recipes.md`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer, model_validator
from pydantic_core import PydanticCustomError

Credit = Literal["group_mean", "group_mean_std", "per_turn", "gamma"]
Objective = Literal["grpo", "dr_grpo", "kimi", "cispo", "gspo", "tis", "icepop"]
Aggregation = Literal["group_tokens", "token", "rollout", "constant"]
Sampler = Literal["uniform", "failure", "hops", "harder"]

HARNESSES = ("swarm", "single", "search", "command")
TERMS = ("item_f1", "exact_match", "r_parallel", "r_parallel_count", "r_finish", "invalid_calls", "retrieval")
KINDS: dict[str, tuple[str, ...]] = {
    "facts": ("wide", "deep", "mixed", "long", "narrow"),
    "retrieval": ("hops_1", "hops_2", "hops_3"),
}
"""The kinds of task of each built-in task set."""
RETRIEVAL_KINDS = {"hops_1": 0.2, "hops_2": 0.35, "hops_3": 0.45}
CREDITS: tuple[str, ...] = get_args(Credit)
OBJECTIVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("rollout", ("eps", "eps_high")),
    "dr_grpo": ("constant", ("eps", "eps_high")),
    "kimi": ("group_tokens", ("alpha", "beta", "tau")),
    "cispo": ("token", ("low", "high")),
    "gspo": ("rollout", ("eps", "eps_high")),
    "tis": ("token", ("cap", "eps", "eps_high")),
    "icepop": ("token", ("alpha", "beta", "eps", "eps_high")),
}
"""Objectives, each with its own aggregation and the names of its parameters."""

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Pair = Annotated[tuple[Positive, Positive], Field(strict=False)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, types are strict, values do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def check_known(name: str, known: Iterable[str], what: str, *, more: str = "") -> None:
    """Accept a known name; otherwise raise, naming the nearest one or all."""
    known = list(known)
    if name in known:
        return
    close = nearest(name, known)
    hint = f'did you mean "{close}"?' if close else f"known: {', '.join(known)}{more}"
    raise PydanticCustomError("name", 'unknown {what} "{name}"; {hint}', {"what": what, "name": name, "hint": hint})


class Weight(Section):
    """A reward term's weight: constant, or linear from `from` to `to` over the first `over` of the updates."""

    from_: float = Field(alias="from", description="Weight at the first update.")
    to: float = Field(description="Weight from `over` on; 0 ends the term's influence.")
    over: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.6, description="Share of the updates after which `to` is reached. 0.6 [C]."
    )

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"from": float(value), "to": float(value), "over": 1.0}
        if not isinstance(value, (dict, Weight)):
            raise PydanticCustomError("weight", "expected a number, or a table { from = 0.3, to = 0.0, over = 0.6 }")
        return value

    @model_serializer
    def _plain(self) -> float | dict[str, float]:
        return self.from_ if self.constant else {"from": self.from_, "to": self.to, "over": self.over}

    @property
    def constant(self) -> bool:
        """Whether the weight never changes."""
        return self.from_ == self.to


class Tasks(Section):
    """What to train on: the built-in facts, or your own JSONL (and corpus)."""

    use: Literal["facts", "retrieval", ""] = Field(
        default="facts",
        description="Built-in task set: `facts` (questions whose answer is a table), `retrieval` (multi-hop questions "
        "whose supporting chunks are to be found); empty when `path` is given.",
    )
    path: str = Field(default="", description="JSONL of tasks (prompt, answer). Relative to the recipe.")
    corpus: str = Field(default="", description="Folder of text/Markdown, or a JSONL of documents, for `path` tasks.")
    kinds: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        default={"wide": 0.5, "deep": 0.2, "narrow": 0.3},
        description="Mixture of task kinds (shares; built-in sets only) [D]. `retrieval`: by default hops_1 = 0.2, "
        "hops_2 = 0.35, hops_3 = 0.45.",
    )
    wide: Pair = Field(
        default=(4, 10), description="Fewest and most entities of a wide training question; held-out ones have 8–10."
    )
    mixed: Pair = Field(default=(2, 4), description="Fewest and most entities of a mixed training question.")
    held_out_kinds: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        default={}, description="Mixture of the held-out tasks; empty: as `kinds`."
    )
    snippet_chars: Natural = Field(
        default=80, description="Characters of a document that search shows beside its id (`corpus` only)."
    )
    train: Positive = Field(default=512, description="Number of training tasks generated (built-in sets only).")
    held_out: Natural = Field(default=96, description="Number of held-out tasks; they share no entity with training.")
    sampler: Sampler = Field(
        default="uniform",
        description="How prompts are drawn: `uniform`, `failure` (in proportion to 1 - success [P]), `hops` (phases), "
        "`harder` (harder ones later [P]).",
    )
    thin_negatives: Share = Field(default=1.0, description="Share of negative samples kept; < 1 thins them [P].")
    fail_rate: Share = Field(default=0.0, description="Share of tool executions that fail (timeouts, errors).")

    @model_validator(mode="before")
    @classmethod
    def _source(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("path") and "use" not in value:
            return {**value, "use": ""}
        if isinstance(value, dict) and value.get("use") == "retrieval" and "kinds" not in value:
            return {**value, "kinds": RETRIEVAL_KINDS}
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Tasks:
        if self.use and self.path:
            raise PydanticCustomError(
                "combo", "both `use` and `path` are given; remove one (`path` means your own tasks)"
            )
        if not self.use and not self.path:
            raise PydanticCustomError("combo", 'no task source; give `use = "facts"` or `path = "tasks.jsonl"`')
        if self.use and self.corpus:
            raise PydanticCustomError("combo", "`corpus` belongs to your own tasks; the built-in sets bring their own")
        if self.use and not any(self.kinds.values()):
            raise PydanticCustomError("combo", "all shares in `kinds` are zero; give at least one kind a share")
        if self.held_out_kinds and not any(self.held_out_kinds.values()):
            raise PydanticCustomError(
                "combo", "all shares in `held_out_kinds` are zero; give at least one kind a share"
            )
        for kind in (*self.kinds, *self.held_out_kinds) if self.use else ():
            check_known(kind, KINDS[self.use], "kind of task")
        for name, (low, high) in (("wide", self.wide), ("mixed", self.mixed)):
            if low > high:
                raise PydanticCustomError(
                    "combo",
                    "`{name}` = [{low}, {high}] is empty; put the smaller first",
                    {"name": name, "low": low, "high": high},
                )
        return self


class Stage(Section):
    """From progress `from` on, a frozen agent runs on `policy` (start small, move to larger ones later [P])."""

    from_: Share = Field(alias="from", description="Training progress in [0, 1] from which the stage holds.")
    policy: str = Field(min_length=1, description="A policy name (`policy@v0`) or the path of a checkpoint.")


class Agent(Section):
    """A role of the harness: which policy speaks for it, and whether its tokens are trained."""

    policy: str = Field(
        default="",
        description="`policy` (the trained one), `policy@v0` (frozen at the start), a path, or an outside model's "
        "name. Default: `policy` when trainable, else `policy@v0` [P].",
    )
    trainable: bool = Field(default=False, description="Whether this role's sampled tokens enter the loss.")
    stages: list[Stage] = Field(default=[], description="Policies by training progress, ascending; frozen roles only.")
    base_url: str = Field(default="", description="OpenAI-compatible server of an outside model, e.g. for a judge.")
    api_key_env: str = Field(default="", description="Environment variable that holds that server's key.")
    model: str = Field(
        default="", description="Regular expression: model names (whole) that a foreign program sends for this role."
    )
    system: str = Field(
        default="", description="Regular expression: found in the system message of this role's requests."
    )

    @field_validator("model", "system")
    @classmethod
    def _expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise PydanticCustomError(
                "combo", "`{value}` is no regular expression: {error}", {"value": value, "error": str(error)}
            ) from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _default_policy(cls, value: Any) -> Any:
        if isinstance(value, dict) and not value.get("policy") and not value.get("base_url"):
            return {**value, "policy": "policy" if value.get("trainable") is True else "policy@v0"}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Agent:
        if self.trainable and self.policy != "policy":
            raise PydanticCustomError(
                "combo",
                'trainable = true but policy = "{policy}" is frozen; set policy = "policy" or trainable = false',
                {"policy": self.policy},
            )
        if self.trainable and (self.stages or self.base_url):
            raise PydanticCustomError("combo", "a trainable role cannot have `stages` or `base_url`")
        if self.base_url and not self.policy:
            raise PydanticCustomError("combo", "`base_url` needs `policy`, the model's name at that server")
        starts = [stage.from_ for stage in self.stages]
        if any(a >= b for a, b in pairwise(starts)):
            raise PydanticCustomError(
                "combo", "`stages` must ascend in `from`, given {starts}; sort them", {"starts": str(starts)}
            )
        return self


class Limits(Section):
    """The budget of an episode, in training and evaluation alike; the gateway is the hard stop."""

    critical_steps: Positive = Field(
        default=14, description="Critical steps of an episode (recipes: K2.5 [P]); 14 [D]."
    )
    tokens: Natural = Field(default=0, description="Tokens of a session's context; 0: what the engine can hold.")
    calls: Positive = Field(default=200, description="Model calls of a rollout, sub-agents included [D].")
    timeout_s: Annotated[float, Field(gt=0.0)] = Field(default=120.0, description="Wall-clock limit of a rollout.")
    width: Positive = Field(default=16, description="Concurrent sub-agents; beyond it they run in waves [D].")


class Sampling(Section):
    """How the policy samples while training."""

    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = Field(
        default=1.0, description="1 [C]. Greedy samples cannot be trained on."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="Must be 1: the learner cannot reproduce the log-probs of a truncated distribution."
    )
    max_tokens: Positive = Field(default=320, description="Most tokens of one assistant turn.")


class Reward(BaseModel):
    """One reason to pay or fine. Keys beyond these are the term's own parameters."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    use: str = Field(
        description="`item_f1`, `exact_match`, `r_parallel`, `r_parallel_count`, `r_finish`, `invalid_calls`, "
        "`retrieval`, or your own `module:function`."
    )
    weight: Weight = Field(
        default=Weight(**{"from": 1.0, "to": 1.0, "over": 1.0}),
        description="A number, or `{ from, to, over }`: linear over the first `over` of the updates. λ1 = 0.3, "
        "λ2 = 0.2, to zero over 0.6 [C].",
    )
    optional: bool = Field(default=False, description="A term that is None is skipped for its group; else unscored.")

    @property
    def params(self) -> dict[str, Any]:
        """The term's own parameters: every key beyond `use`, `weight` and `optional`."""
        return dict(self.model_extra or {})


class KL(Section):
    """Pull towards the warm start. k1 enters the advantage without gradient; k2 and k3 are loss terms."""

    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="k1 [P, Composer 2]: k3's variance explodes."
    )
    coef: Annotated[float, Field(ge=0.0)] = Field(default=0.0, description="Strength; 0 switches it off.")


class Lora(Section):
    """Low-rank adapters instead of all weights (needs the extra `lora`)."""

    rank: Natural = Field(default=0, description="0: train all weights. 32 [C, Context-1].")
    alpha: Annotated[float, Field(gt=0.0)] = Field(default=32.0, description="Scale of the adapter's output.")
    targets: list[str] = Field(default=[], description="Names of the linear layers; empty: all of the blocks.")


class Train(Section):
    """How rewards become weights."""

    updates: Positive = Field(default=40, description="Number of optimiser cuts; schedules run over it.")
    groups: Positive = Field(default=8, description="Prompts an update.")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="Rollouts a prompt; 8 [P, Context-1].")
    credit: Credit = Field(default="group_mean", description="Scored group to advantages; no std by default [P].")
    objective: Objective = Field(default="kimi", description="Loss: K2.5 [P] by default; see docs/learner.md.")
    objective_params: dict[str, float] = Field(
        default={}, description="Parameters of the objective: `alpha`, `beta`, `tau` (kimi: 0.5, 2.0, 1e-3 [D]), ..."
    )
    abandoned: bool = Field(
        default=True,
        description="Train also what was sampled on branches that the harness left (rolled back, sampled again): "
        "the policy sampled it, and its rollout has the reward.",
    )
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="Decay of a turn's reward, r·γ^(T-i) [P]; used by credit `gamma`."
    )
    lr: Annotated[float, Field(gt=0.0)] = Field(default=1e-4, description="AdamW's learning rate [D].")
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="AdamW's betas [C, Context-1]."
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Course of the learning rate after the warmup, down to zero at the end."
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(default=0.0, description="AdamW's decoupled weight decay.")
    warmup_updates: Natural = Field(default=0, description="Updates over which the learning rate rises from zero.")
    grad_clip: Annotated[float, Field(ge=0.0)] = Field(
        default=1.0, description="Largest gradient norm; 0: no clipping."
    )
    epochs: Positive = Field(default=1, description="Passes over a batch; 1: a prompt is never trained twice [P].")
    minibatches: Positive = Field(default=1, description="Optimiser steps an epoch.")
    token_budget: Annotated[int, Field(ge=64)] = Field(default=16384, description="Most padded tokens a micro-batch.")
    aggregation: Aggregation = Field(
        default="group_tokens",
        description="What the token sum is divided by: tokens of the group [P, K2.5], of the batch, of each rollout, "
        "or a constant. Default: the objective's own.",
    )
    constant_length: Annotated[float, Field(gt=0.0)] = Field(
        default=1024.0, description="Tokens a rollout that aggregation `constant` divides by [D]."
    )
    kl: KL = Field(default=KL(), description="Penalty towards the warm start.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Arithmetic of the learner.")
    lora: Lora = Field(default=Lora(), description="Low-rank adapters.")
    checkpoint_every: Positive = Field(default=10, description="Updates between checkpoints; the last is always saved.")

    @model_validator(mode="before")
    @classmethod
    def _own_aggregation(cls, value: Any) -> Any:
        if isinstance(value, dict) and "aggregation" not in value and value.get("objective") in OBJECTIVES:
            return {**value, "aggregation": OBJECTIVES[value["objective"]][0]}
        return value

    @model_validator(mode="after")
    def _known_params(self) -> Train:
        for key in self.objective_params:
            check_known(key, OBJECTIVES[self.objective][1], f'parameter of objective "{self.objective}":')
        return self


class RolloutSection(Section):
    """How episodes run."""

    mode: Literal["sync", "async"] = Field(default="sync", description="`async` overlaps rollouts with updates [P].")
    max_staleness: Natural = Field(default=1, description="Versions a rollout may lag (async); queue time counts.")
    stale: Literal["wait", "drop"] = Field(default="wait", description="`drop` favours short rollouts, so wait [D].")
    concurrency: Positive = Field(default=64, description="Rollouts in flight.")
    retries: Natural = Field(
        default=2, description="Retries of infrastructure faults; a harness fault is never retried."
    )
    partial: bool = Field(default=False, description="Pause long rollouts at an update, go on under new weights [P].")


class EngineSection(Section):
    """Where tokens come from."""

    slots: Positive = Field(default=64, description="Sequences decoded at once.")
    max_queue: Positive = Field(default=4096, description="Requests that may wait; beyond it HTTP 429.")
    context: Natural = Field(default=0, description="Tokens of context; 0: the model's own.")
    threads: Natural = Field(default=0, description="CPU threads of torch; 0: torch's choice.")


class Arm(Section):
    """One row of the result table: a policy in a harness, on the held-out tasks."""

    policy: str = Field(default="policy", description="`policy` (trained), `policy@v0` (warm start), or a path.")
    harness: str = Field(default="", description="Empty: the recipe's own harness.")


class Eval(Section):
    """Held-out evaluation."""

    every: Natural = Field(default=0, description="Updates between evaluations; 0: only at the end.")
    tasks: Positive = Field(default=96, description="Held-out tasks an arm.")
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = Field(default=0.0, description="0: greedy.")
    seeds: Positive = Field(default=1, description="Passes over the tasks, each with its own seed.")
    splits: list[str] = Field(default=[], description="`held_out`, `unseen_layout`; empty: all there are.")
    arms: dict[str, Arm] = Field(
        default={"warm_start": Arm(policy="policy@v0"), "trained": Arm()},
        description="Rows of the result table, by name.",
    )
