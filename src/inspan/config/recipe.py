"""The recipe: everything a run depends on, in one validated object. Contract: a recipe that exists can be run as far
as its own fields can tell; what only the machine or the files can tell is checked where they are opened.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from inspan.config.command import Command
from inspan.config.search import Search
from inspan.config.sections import (
    HARNESSES,
    TERMS,
    Agent,
    EngineSection,
    Eval,
    Limits,
    Reward,
    RolloutSection,
    Sampling,
    Section,
    Tasks,
    Train,
    check_known,
    nearest,
)

_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_ROLES: dict[str, dict[str, dict[str, Any]]] = {
    "swarm": {"orchestrator": {"trainable": True}, "subagent": {"trainable": False}},
    "single": {"main": {"trainable": True}},
    "search": {"main": {"trainable": True}},
}

_FREE_ON_RESUME: dict[str, Any] = {
    "name": True,
    "python_path": True,
    "eval": True,
    "command": {"folder", "path", "template", "keep", "install"},
    "train": {"updates", "checkpoint_every"},
    "rollout": {"retries"},
    "engine": {"threads", "max_queue", "api_key_env", "base_url"},
    "limits": {"timeout_s"},
}


def check_name(name: str, known: Iterable[str], what: str) -> None:
    """Accept a built-in name or `module:function`; otherwise raise, naming the nearest known one."""
    if not _OBJECT.fullmatch(name):
        check_known(name, known, what, more=", or module:function")


class Recipe(Section):
    """Everything a run depends on. Load one with `inspan.config.load`; `dump_toml` writes the resolved form."""

    name: str = Field(default="run", min_length=1, description="Free text; names the run directory.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Every random draw of a run derives from it.")
    model: str = Field(
        default="tiny",
        min_length=1,
        description="`tiny` (ships with Inspan), a path, a hub id, or `smollm2` (needs the extra `smollm2`).",
    )
    harness: str = Field(
        default="swarm", description="`swarm`, `single`, `search`, `command` or your own `module:function`."
    )
    deterministic: bool = Field(
        default=False, description="Fixed admission order and batch shapes: a resumed run is bit-equal (slower)."
    )
    python_path: list[str] = Field(
        default=[], description="Folders searched for your modules; the recipe's own folder is added by itself."
    )
    options: dict[str, Any] = Field(default={}, description="Passed to the harness as `ctx.options`.")
    command: Command = Field(default=Command(), description='The program, for `harness = "command"`.')
    search: Search = Field(default=Search(), description='The budget, for `harness = "search"`.')
    tasks: Tasks = Field(default=Tasks(), description="What to train on.")
    agents: dict[str, Agent] = Field(
        default={}, validate_default=True, description="Roles of the harness; those of a built-in one have defaults."
    )
    limits: Limits = Field(default=Limits(), description="The budget of an episode.")
    sampling: Sampling = Field(default=Sampling(), description="How the policy samples.")
    rewards: list[Reward] = Field(
        default=[Reward(use="item_f1")], min_length=1, description="The terms of the reward, summed with their weights."
    )
    train: Train = Field(default=Train(), description="How rewards become weights.")
    rollout: RolloutSection = Field(default=RolloutSection(), description="How episodes run.")
    engine: EngineSection = Field(default=EngineSection(), description="Where tokens come from.")
    eval: Eval = Field(default=Eval(), description="Held-out evaluation.")

    @model_validator(mode="before")
    @classmethod
    def _roles(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = value.get("agents", {})
        if not isinstance(given, dict):
            return value
        harness = value.get("harness", "swarm")
        if harness in _ROLES:
            roles = {role: given.get(role, spec) for role, spec in _ROLES[harness].items()}
        else:
            roles = {} if given else {"main": {"trainable": True}}
        return {**value, "agents": {**roles, **given}}

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        check_name(self.harness, HARNESSES, "harness")
        arms = {arm.harness for arm in self.eval.arms.values()}
        if "command" in (self.harness, *arms) and not self.command.argv:
            raise PydanticCustomError("combo", 'harness = "command" needs [command] argv = ["program", ...]')
        for index, reward in enumerate(self.rewards):
            check_name(reward.use, TERMS, f"reward term rewards.{index}.use")
            for key in reward.params:
                if close := nearest(key, Reward.model_fields):
                    raise PydanticCustomError(
                        "name",
                        'rewards.{index}: unknown key "{key}"; did you mean "{close}"?',
                        {"index": index, "key": key, "close": close},
                    )
        if all(not r.weight.from_ and not r.weight.to for r in self.rewards):
            raise PydanticCustomError(
                "combo", "every reward has weight 0, so nothing can be learned; raise one of `rewards`"
            )
        if not any(agent.trainable for agent in self.agents.values()):
            raise PydanticCustomError("combo", "no agent is trainable; set trainable = true for one of `agents`")
        for name, arm in self.eval.arms.items():
            if arm.harness:
                check_name(arm.harness, HARNESSES, f"harness of eval.arms.{name}")
        if self.sampling.top_p != 1.0:
            raise PydanticCustomError(
                "combo",
                "sampling.top_p = {top_p}: the learner cannot reproduce a truncated distribution; set it to 1",
                {"top_p": self.sampling.top_p},
            )
        if 0 < self.limits.tokens <= self.sampling.max_tokens:
            raise PydanticCustomError(
                "combo",
                "limits.tokens = {tokens} leaves no room beside sampling.max_tokens = {turn}; "
                "raise the first or lower the second",
                {"tokens": self.limits.tokens, "turn": self.sampling.max_tokens},
            )
        if self.rollout.mode == "async" and self.rollout.max_staleness < 1:
            raise PydanticCustomError(
                "combo", 'rollout.mode = "async" needs rollout.max_staleness >= 1; or use mode = "sync"'
            )
        if self.deterministic and (self.rollout.mode == "async" or self.rollout.partial):
            raise PydanticCustomError(
                "combo", 'deterministic = true needs rollout.mode = "sync" and rollout.partial = false'
            )
        if self.train.minibatches > self.train.groups * self.train.group_size:
            raise PydanticCustomError(
                "combo", "train.minibatches exceeds the rollouts of an update (groups x group_size)"
            )
        return self

    def hash(self) -> str:
        """A key that two recipes share when a checkpoint of one can be resumed under the other."""
        return hashlib.sha256(json.dumps(self.binding(), sort_keys=True).encode()).hexdigest()[:16]

    def binding(self) -> dict[str, Any]:
        """What must not change on resume, as plain data.

        That is all but the name, the number of updates, how often to save and evaluate, retries, threads, timeouts,
        and the folder (not the file name) of the user's tasks.
        """
        data = self.model_dump(mode="json", by_alias=True, exclude=_FREE_ON_RESUME)
        for key in ("path", "corpus"):
            data["tasks"][key] = PurePath(data["tasks"][key]).name
        return data
