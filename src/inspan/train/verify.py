"""`--verify`: the invariants of the house, checked while a run goes on. Contract: a breach stops the run and is named.

Witnesses stand outside the recorder: one between gateway and engine (what was asked and sampled), one between gateway
and client (whether a call was on disk before the answer ended). What is learned from is checked against the rollouts,
and the log-probs of what these very weights sampled are computed again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from inspan.engine.witness import WitnessEngine
from inspan.errors import InspanError, InvariantBroken
from inspan.gateway.app import read_path
from inspan.gateway.gateway import Gateway
from inspan.learner.learner import Learner
from inspan.trace.chains import trained_chains
from inspan.trace.records import Chain, ChainCredit, Rollout, Scored
from inspan.trace.store import TraceStore
from inspan.trace.verify import Breach, breaches

TOLERANCE: Final = {"float32": 2e-3, "bfloat16": 0.2}
"""By how much a log-prob that is computed again may differ [D]: batch shapes and kernels round differently."""
_SHOWN: Final = 5
_ID: Final = re.compile(rb'"id": ?"(?:chatcmpl-|resp_|msg_)([^"]+)"')
_LAST: Final = re.compile(rb"data: \[DONE\]|event: (?:response\.(?:completed|incomplete)|message_stop)")
Message = MutableMapping[str, Any]


class Verifier:
    """Checks every rollout and every batch of a run; `demand` raises what was found."""

    def __init__(self, witness: WitnessEngine, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._witness, self._clock = witness, clock
        self.seconds = 0.0
        self.checked: dict[str, int] = {"rollouts": 0, "calls": 0, "tokens": 0, "answers": 0, "logprobs": 0}
        self._ended: set[str] = set()
        self._learned: set[str] = set()
        self._found: list[Breach] = []

    def rollout(self, rollout: Rollout) -> None:
        """A rollout has ended."""
        began = self._clock()
        if rollout.id in self._ended:
            self._found.append(Breach("one end", rollout.id, "the rollout reached a second terminal state"))
        self._ended.add(rollout.id)
        self._found += breaches(rollout, self._witness.take(rollout.id))
        self.checked["rollouts"] += 1
        self.checked["calls"] += len(rollout.calls)
        self.checked["tokens"] += sum(len(node.tokens) - node.start for node in rollout.nodes)
        self.seconds += self._clock() - began

    def answer(self, rollout: str, call: str, *, recorded: bool) -> None:
        """An answer is about to end."""
        self.checked["answers"] += 1
        if not recorded:
            self._found.append(Breach("recorded before answered", f"{rollout}, call {call}", "it is not on disk"))

    def batch(self, scored: Sequence[Sequence[Scored]], credits: Sequence[ChainCredit], learner: Learner) -> None:
        """A batch is about to be learned from."""
        began = self._clock()
        owners = {
            _key(chain): one.rollout
            for group in scored for one in group if one.reward is not None
            for chain in trained_chains(one.rollout)
        }  # fmt: skip
        self._found += self._untrue(scored, credits, owners)
        whole = [credit for credit in credits if _at_one_version(owners.get(_key(credit.chain)), learner.version)]
        gap, count = learner.misfit(whole) if whole else (0.0, 0)
        self.checked["logprobs"] += count
        if gap > TOLERANCE[learner.settings.dtype]:
            what = f"computed again, a log-prob differs by {gap:.3g}"
            self._found.append(Breach("sampled in this context", f"{count} tokens of version {learner.version}", what))
        self.seconds += self._clock() - began

    def _untrue(
        self, scored: Sequence[Sequence[Scored]], credits: Sequence[ChainCredit], owners: Mapping[object, Rollout]
    ) -> list[Breach]:
        found: list[Breach] = []
        members = [one for group in scored for one in group]
        for one in members:
            if one.reward is None:
                continue
            if one.rollout.id in self._learned:
                found.append(Breach("learned once", one.rollout.id, "the rollout is in a second batch"))
            if not one.rollout.trainable:
                found.append(Breach("incomplete is untrained", one.rollout.id, "it has a reward"))
            self._learned.add(one.rollout.id)
        for credit in credits:
            chain = credit.chain
            if _key(chain) not in owners:
                found.append(Breach("learned as recorded", chain.session, "a chain is no rollout's of this batch"))
            for at, trained in enumerate(chain.trained):
                if not trained and (credit.advantages[at] or credit.weights[at]):
                    found.append(Breach("learned as recorded", chain.session, f"token {at} has weight, and is context"))
                    break
        return found

    def demand(self) -> None:
        """Raise `InvariantBroken` with what was found so far, if anything was."""
        if self._found:
            told = "\n  ".join(str(one) for one in self._found[:_SHOWN])
            more = f"\n  and {len(self._found) - _SHOWN} more" if len(self._found) > _SHOWN else ""
            raise InvariantBroken(f"an invariant is broken:\n  {told}{more}",
                                  hint="please report it, with the run's trace.sqlite")  # fmt: skip

    def report(self) -> dict[str, float]:
        """How much was checked, and the seconds that it took."""
        return {**self.checked, "seconds": round(self.seconds, 3)}


def _key(chain: Chain) -> object:
    return (chain.session, chain.nodes, chain.tokens, chain.logprobs, chain.versions)


def _at_one_version(rollout: Rollout | None, version: int) -> bool:
    """Whether all of a rollout ran under these weights: a request that goes on under new ones keeps its old KV."""
    return rollout is not None and rollout.version_started == rollout.version_finished == version


class AnswerWitness:
    """Stands between a gateway's application and its clients: is a call in the store as its answer ends?"""

    def __init__(self, gateway: Gateway, store: TraceStore, verifier: Verifier) -> None:
        self._app, self._gateway, self._store, self._verifier = gateway.app, gateway, store, verifier

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        """Pass a request on and look at its answer."""
        rollout = self._rollout(scope)
        told: list[bytes] = []

        async def watched(message: Message) -> None:
            body = message.get("body", b"")
            if rollout and not told and (found := _ID.search(body)):
                told.append(found[1])
            if rollout and told and told[0] and (not message.get("more_body") or _LAST.search(body)):
                call = told[0].decode()
                self._verifier.answer(rollout, call, recorded=self._store.has_call(rollout, call))
                told[0] = b""
            await send(message)

        await self._app(scope, receive, watched)

    def _rollout(self, scope: Any) -> str | None:
        address = read_path(scope.get("path", ""))
        if address is None or address.endpoint not in ("chat/completions", "responses", "messages"):
            return None
        try:
            return self._gateway.authorise(address.key).id
        except InspanError:
            return None
