"""The parts of a run, put together from a recipe: engine, gateway, harness, runner. Contract: no training here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from inspan.config import Agent, Recipe
from inspan.config.search import Search
from inspan.engine.base import SamplingParams, WeightsRef
from inspan.engine.openai_engine import OpenAIChat
from inspan.engine.torch_engine import TorchEngine
from inspan.engine.witness import WitnessEngine
from inspan.errors import ModelError, RecipeError
from inspan.gateway.base import Limits, Role
from inspan.gateway.gateway import Gateway
from inspan.gateway.renderers import described, renderer_for
from inspan.parity.watch import Watch
from inspan.rollout.load import LoadedHarness, load_harness
from inspan.rollout.run import Runner
from inspan.trace.store import TraceStore
from inspan.train.environment import Environment
from inspan.train.models import model_directory
from inspan.train.verify import AnswerWitness, Verifier

POLICY, FROZEN = "policy", "policy@v0"


@dataclass(slots=True)
class Stack:
    """Engine and gateway of a run, with what is needed to make runners for any harness on them."""

    recipe: Recipe
    environment: Environment
    directory: Path  # the model's
    engine: TorchEngine
    gateway: Gateway
    renderer: Mapping[str, str]
    store: TraceStore | None
    verifier: Verifier | None = None
    _loaded: dict[str, LoadedHarness] = field(default_factory=dict)

    def harness(self, spec: str) -> LoadedHarness:
        """A harness by its recipe name, loaded once."""
        if spec not in self._loaded:
            self._loaded[spec] = load_harness(spec, self.recipe.python_path, command=self.recipe.command)
        return self._loaded[spec]

    def limits(self) -> Limits:
        """The recipe's limits; the gateway is the hard stop."""
        limits = self.recipe.limits
        return Limits(limits.critical_steps, limits.tokens or None, limits.calls, limits.width)

    def setting(self, spec: str) -> dict[str, Any]:
        """What of a fingerprint is known before anything runs in a harness."""
        harness, served = self.harness(spec), self.served()
        if harness.name == "search":  # its budget is the harness's own
            served["limits"] |= self.search().model_dump()
        return {"harness": harness.name, "version": harness.version, **served}

    def served(self) -> dict[str, Any]:
        """What of a fingerprint does not depend on the harness."""
        limits, sampling = self.recipe.limits, self.recipe.sampling
        return {
            "renderer": self.renderer,
            "limits": {
                "critical_steps": limits.critical_steps,
                "calls": limits.calls,
                "tokens": limits.tokens,
                "width": limits.width,
                "context": self.engine.context_length,
                "max_tokens": sampling.max_tokens,
            },
        }

    def runner(
        self, spec: str, roles: list[Role], *, temperature: float | None = None, watch: Watch | None = None
    ) -> Runner:
        """A runner of rollouts in a harness; `roles[0]` speaks for the root session."""
        sampling = self.recipe.sampling
        harness = self.harness(spec)
        return Runner(
            gateway=self.gateway,
            harness=harness,
            roles=roles,
            limits=self.limits(),
            sampling=SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature if temperature is None else temperature,
                top_p=sampling.top_p,
            ),
            timeout_s=self.recipe.limits.timeout_s,
            watch=watch,
            make_tools=self.environment.make_tools,
            options=self._options(),
            check=self.verifier.rollout if self.verifier else None,
            version=lambda: self.engine.version(POLICY),
        )

    def search(self) -> Search:
        """The budget of the search agent, with every number filled in for this engine's context."""
        context = self.recipe.limits.tokens or self.engine.context_length
        return self.recipe.search.scaled(context - self.recipe.sampling.max_tokens)

    def _options(self) -> dict[str, Any]:
        """What a harness gets as options: the recipe's own, and what it may want to know of limits and model."""
        tokenizer = self.directory / "tokenizer.json"
        known = {"width": self.recipe.limits.width, "search": self.search()}
        if tokenizer.is_file():
            known["tokenizer"] = str(tokenizer)
        return {**self.recipe.options, **known}

    async def ensure(self, policy: str) -> None:
        """See that the engine serves a policy: a known name, a shipped model, or the directory of one."""
        if policy not in self.engine.policies and not self._outside(policy):
            directory = model_directory(policy)
            _same_tokens(directory, self.directory)
            await self.engine.load(policy, WeightsRef(0, path=str(directory)))

    def _outside(self, policy: str) -> bool:
        return any(agent.base_url and agent.policy == policy for agent in self.recipe.agents.values())

    async def close(self) -> None:
        """Close gateway, engine and store."""
        await self.gateway.close()
        await self.engine.close()
        if self.store is not None:
            self.store.close()


def build_stack(
    recipe: Recipe, environment: Environment, store: TraceStore | None, *, verify: bool = False, durable: bool = False
) -> Stack:
    """Load the model and open the gateway, with witnesses around it to `verify`. Raises ModelError or RecipeError.

    A `durable` gateway keeps its grants in the store, and goes on with them after a restart.
    """
    directory = model_directory(recipe.model)
    engine = TorchEngine(
        {POLICY: str(directory), FROZEN: str(directory)},
        slots=recipe.engine.slots,
        context_length=recipe.engine.context,
        max_queue=recipe.engine.max_queue,
        threads=recipe.engine.threads,
        deterministic=recipe.deterministic,
    )
    _check_context(recipe, engine)
    renderer = renderer_for(directory)
    outside = {agent.policy: _outside_chat(agent) for agent in recipe.agents.values() if agent.base_url}
    witness = WitnessEngine(engine) if verify else None
    gateway = Gateway(witness or engine, renderer, store=store, outside=outside, durable=durable)
    verifier = Verifier(witness) if witness else None
    if verifier and store:
        gateway.app = AnswerWitness(gateway, store, verifier)
    return Stack(recipe, environment, directory, engine, gateway, described(renderer, directory), store, verifier)


def _check_context(recipe: Recipe, engine: TorchEngine) -> None:
    """Refuse a context that the model never saw, and turns that fill all of it."""
    longest, context, turn = engine.spec(POLICY).positions, engine.context_length, recipe.sampling.max_tokens
    if context > longest:
        hint = f"give at most {longest}, or 0 for the model's own"
        raise RecipeError(f"{context} exceeds the {longest} tokens of the model", where="engine.context", hint=hint)
    if turn >= context:
        raise RecipeError(
            f"a turn of {turn} tokens leaves no room for a prompt in a context of {context}",
            where="sampling.max_tokens",
            hint="lower sampling.max_tokens, or raise engine.context",
        )


def _same_tokens(directory: Path, model: Path) -> None:
    """Refuse a policy that would read other tokens than the gateway writes."""
    files = [folder / "tokenizer.json" for folder in (directory, model)]
    if all(file.is_file() for file in files):
        one, other = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
        if one != other:
            hint = "arms and frozen agents share the tokenizer of `model`; an outside model takes `base_url`"
            raise ModelError(
                f"its tokenizer is not that of the recipe's model ({model})", where=str(directory), hint=hint
            )


def _outside_chat(agent: Agent) -> OpenAIChat:
    key = os.environ.get(agent.api_key_env, "") if agent.api_key_env else ""
    return OpenAIChat(agent.base_url, api_key=key, model=agent.policy)


def roles_at(agents: dict[str, Agent], progress: float) -> list[Role]:
    """The roles at `progress` of a run: frozen ones move through their stages."""
    roles = []
    for name, agent in agents.items():
        reached = [stage.policy for stage in agent.stages if stage.from_ <= progress]
        policy = reached[-1] if reached else agent.policy
        roles.append(Role(name, policy, agent.trainable, _rule(agent.model), _rule(agent.system)))
    return roles


def _rule(expression: str) -> re.Pattern[str] | None:
    return re.compile(expression) if expression else None
