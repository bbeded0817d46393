"""The embedded engine: several policies, continuous batching, one thread. Contract: `engine.base.Engine`.

The engine steps *inside* the asyncio event loop: a task that lives while there is work. Between steps it lets every
other coroutine run until the loop has nothing ready, so that those who just got an answer come back with their next
request before the next step, and batches are full. For small models handing the GIL to an engine thread would cost
more than it gives; and the order of events stays reproducible.

Weights are swapped by `load`, which runs between two steps by construction. With `deterministic`, the bits of a
sample depend on its prompt, parameters, seed and weights alone: not on its neighbours, the order of arrival, how a
prompt was cut or what was cached.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch

from inspan.engine.base import Sample, SamplingParams, Watch, WeightsRef
from inspan.engine.lane import Counters, Lane, Request
from inspan.engine.sampler import spread
from inspan.engine.threads import ThreadTuner
from inspan.engine.weights import ModelSpec, Source, Weights, load_weights, read_config, read_state
from inspan.errors import EngineError, EngineOverloaded, ModelError, RequestError
from inspan.trace.records import Tokens

SETTLE_TURNS = 1000
SETTLE_SECONDS = 0.02
"""Bounds on letting others run before a step, so that a busy coroutine cannot starve the engine."""
SMALL_PARAMETERS = 8_000_000
"""Up to this size a model begins on one thread: a step is a hundred operations of some 10 µs each."""
OFF_LOOP_PARAMETERS = 20_000_000
"""Models beyond this size are read in a thread, so that the event loop stays alive."""
POOL_BYTES = 256 << 20
POOL_WEIGHTS = 8
"""A policy's KV stays within these many bytes, or so many times those of its weights where that is more; running
requests get what they need beyond it, finished sequences give way."""


class TorchEngine:
    """Serves policies from memory on the CPU.

    `models` maps policy names to sources (a directory, a transformers model, or (config, state dict)); equal sources
    share memory. `slots` is the most requests of a policy that decode at once; finished sequences are kept for prefix
    reuse in these and in up to `cached` more rows (default: as many, at least 16), as far as `POOL_BYTES` go.
    `context_length` 0 means the smallest of the models' own. `max_queue` bounds the requests that wait. `threads` holds
    while the engine steps; 0 means as many, up to torch's own, as prove best (see `engine.threads`).
    """

    def __init__(
        self,
        models: Mapping[str, Source],
        *,
        slots: int = 64,
        context_length: int = 0,
        max_queue: int = 4096,
        threads: int = 0,
        deterministic: bool = False,
        cached: int | None = None,
    ) -> None:
        if slots < 1 or max_queue < 1 or context_length < 0:
            raise ModelError(
                f"slots {slots}, max_queue {max_queue} and context_length {context_length} must be positive"
            )
        self.slots, self.max_queue, self.threads, self.deterministic = slots, max_queue, threads, deterministic
        self.counters = Counters()
        self._cached = cached
        self._files: WeakValueDictionary[object, Weights] = WeakValueDictionary()
        loaded = self._load_all(models)
        longest = min((w.spec.positions for w in loaded.values()), default=0)
        self._context = context_length or longest
        self._lanes: dict[str, Lane] = {}
        for name, weights in loaded.items():
            self._open(name, weights, 0)
        self._tuners: WeakKeyDictionary[Lane, ThreadTuner] = WeakKeyDictionary()
        self._unseeded = itertools.count()
        self._runner: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def context_length(self) -> int:
        """The most tokens (prompt + completion) a request may have."""
        return self._context

    @property
    def policies(self) -> tuple[str, ...]:
        """Names that can be sampled from."""
        return tuple(self._lanes)

    def version(self, policy: str) -> int:
        """The version of a policy that its next token would be sampled at."""
        return self._lane(policy).version

    def spec(self, policy: str) -> ModelSpec:
        """The shape of a policy's model."""
        return self._lane(policy).weights.spec

    async def sample(self, policy: str, prompt: Tokens, params: SamplingParams, watch: Watch | None = None) -> Sample:
        """Sample one continuation of `prompt`; see `engine.base.Engine.sample`."""
        lane = self._lane(policy)
        request = self._request(lane, prompt, params, watch)
        if sum(len(each.queue) for each in self._lanes.values()) >= self.max_queue:
            raise EngineOverloaded(f"the engine's queue is full ({self.max_queue} requests wait)", where=policy)
        self._start()
        lane.queue.append(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            lane.remove(request)
            raise

    async def load(self, policy: str, weights: WeightsRef) -> None:
        """Swap in weights between two decode steps (any coroutine runs between two steps).

        A policy that is not there yet is added; its shape comes from config.json in `weights.path`, else from the
        policy of the same name before "@", else from the only shape there is. The caller's tensors are copied.
        Raises `EngineError` when the weights are incomplete or older than the running version; nothing changes then.
        """
        if self._closed:
            raise EngineError("the engine is closed", where=policy)
        lane = self._lanes.get(policy)
        spec = lane.weights.spec if lane is not None else self._shape(policy, weights)
        self._check_age(policy, weights.version)
        try:
            if spec.parameters > OFF_LOOP_PARAMETERS and not self.deterministic:
                loaded = await asyncio.to_thread(self._read, spec, weights)
            else:
                loaded = self._read(spec, weights)
        except ModelError as error:
            raise EngineError(f"cannot load version {weights.version}: {error}", where=policy) from error
        self._check_age(policy, weights.version)
        lane = self._lanes.get(policy)
        if lane is None:
            self._open(policy, loaded, weights.version)
        else:
            lane.publish(loaded, weights.version)

    def _check_age(self, policy: str, version: int) -> None:
        lane = self._lanes.get(policy)
        if lane is not None and version < lane.version:
            raise EngineError(f"version {version} is older than the running {lane.version}", where=policy)

    def _shape(self, policy: str, weights: WeightsRef) -> ModelSpec:
        """The shape of a policy that is new."""
        if weights.path is not None and os.path.exists(os.path.join(weights.path, "config.json")):
            return ModelSpec.from_config(read_config(weights.path), where=weights.path)
        parent = self._lanes.get(policy.partition("@")[0])
        if parent is not None:
            return parent.weights.spec
        shapes = {lane.weights.spec for lane in self._lanes.values()}
        if len(shapes) != 1:
            raise EngineError("the shape of a new policy is unknown", where=policy, hint="give a path with config.json")
        return shapes.pop()

    def _read(self, spec: ModelSpec, weights: WeightsRef) -> Weights:
        if weights.tensors is not None:
            return Weights(spec, weights.tensors)
        if weights.path is None:
            raise ModelError("weights need a path or tensors")
        return self._shared_file(spec, weights.path)

    def _shared_file(self, spec: ModelSpec, path: str) -> Weights:
        """Weights of a directory, read once while any policy uses them and the files do not change."""
        files = sorted(Path(path).glob("*.safetensors"))
        key = (spec, os.path.realpath(path), tuple(f.stat().st_mtime_ns for f in files))
        found = self._files.get(key)
        if found is None:
            found = self._files[key] = Weights(spec, read_state(path))
        return found

    def share(self, policy: str, source: str) -> None:
        """Add a policy with the present weights and version of another one, without a copy (frozen snapshots)."""
        if policy in self._lanes:
            raise EngineError("there is a policy of this name already", where=policy)
        lane = self._lane(source)
        self._open(policy, lane.weights, lane.version)

    async def close(self) -> None:
        """Fail what runs and free the memory."""
        self._closed = True
        self._abort(EngineError("the engine was closed"))
        self._lanes.clear()

    def _lane(self, policy: str) -> Lane:
        try:
            return self._lanes[policy]
        except KeyError:
            known = ", ".join(sorted(self._lanes)) or "none (closed?)"
            raise EngineError(f"no policy {policy!r}", hint=f"known: {known}") from None

    def _open(self, name: str, weights: Weights, version: int) -> None:
        cached = max(self.slots, 16) if self._cached is None else max(self._cached, 1)
        self._lanes[name] = Lane(
            weights,
            version=version,
            active=self.slots,
            rows=self.slots + cached,
            context=self._context,
            budget=max(POOL_BYTES, POOL_WEIGHTS * 4 * weights.spec.parameters),
            counters=self.counters,
            fixed=self.deterministic,
        )

    def _load_all(self, models: Mapping[str, Source]) -> dict[str, Weights]:
        """Load each source once, however many policies name it."""
        memory: dict[int, Weights] = {}
        loaded: dict[str, Weights] = {}
        for name, source in models.items():
            if isinstance(source, str | os.PathLike):
                spec = ModelSpec.from_config(read_config(str(source)), where=str(source))
                loaded[name] = self._shared_file(spec, str(source))
            else:
                if id(source) not in memory:
                    memory[id(source)] = load_weights(source)
                loaded[name] = memory[id(source)]
        return loaded

    def _request(self, lane: Lane, prompt: Tokens, params: SamplingParams, watch: Watch | None) -> Request:
        """Check a request and wrap it; raises `RequestError` on what can never be served."""
        count, vocab = len(prompt), lane.weights.spec.vocab
        if count == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if count >= self._context:
            what = f"the prompt has {count} tokens; the context is {self._context} tokens, completion included"
            raise RequestError(what, param="prompt", code="context_length_exceeded")
        _check_params(params)
        ids = np.array(prompt, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= vocab:
            raise RequestError(f"a token id is outside 0…{vocab - 1}", param="prompt")
        seed = params.seed if params.seed is not None else next(self._unseeded)
        return Request(
            prompt=prompt if isinstance(prompt, tuple) else tuple(prompt),
            ids=ids,
            params=params,
            key=spread(seed),
            limit=min(params.max_tokens, self._context - count),
            future=asyncio.get_running_loop().create_future(),
            watch=watch,
        )

    def _start(self) -> None:
        """See to it that the stepping task runs on this event loop."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineError("the engine is closed")
        if self._runner is not None and not self._runner.done() and self._loop is loop:
            return
        if self._loop is not loop and self._runner is not None and not self._runner.done():
            self._forget()
        self._loop, self._runner = loop, loop.create_task(self._run(), name="inspan-engine")

    def _forget(self) -> None:
        """Drop every request without waking it (its event loop no longer runs)."""
        for lane in self._lanes.values():
            lane.queue.clear()
            lane.reset()

    async def _run(self) -> None:
        """Step while there is work. A step that raises fails the requests in it and nothing else."""
        before = torch.get_num_threads()
        try:
            while any(lane.has_work for lane in self._lanes.values()):
                await self._settle()
                for lane in tuple(self._lanes.values()):
                    if lane.has_work:
                        self._step(lane, before)
        except BaseException as error:  # cancelled, interrupted, or past mending: nobody may be left waiting
            self._abort(EngineError(f"the engine was stopped: {error!r}"))
            raise
        finally:
            torch.set_num_threads(before)

    def _step(self, lane: Lane, most: int) -> None:
        """One step of a lane, on as many threads as are set, or as have proven best for it (at most `most`)."""
        tuner = self._tuners.get(lane)
        if tuner is None or tuner.most != most:
            small = lane.weights.spec.parameters <= SMALL_PARAMETERS
            tuner = self._tuners[lane] = ThreadTuner(most, 1 if small else most)
        torch.set_num_threads(self.threads or (tuner.threads if self.deterministic else tuner.choose()))
        begin = perf_counter()
        try:
            work = lane.step()
            tuner.record(perf_counter() - begin, work)
        except Exception as error:
            failure = EngineError(f"a decode step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            lane.fail(failure)

    async def _settle(self) -> None:
        """Let other coroutines run until none is ready, so that the next batch is as full as it can be.

        The loop's queue of ready callbacks is private to asyncio; where a loop has none, a few turns must do.
        """
        ready = getattr(asyncio.get_running_loop(), "_ready", None)
        if ready is None:
            for _ in range(16):
                await asyncio.sleep(0)
            return
        end = None if self.deterministic else perf_counter() + SETTLE_SECONDS
        quiet = 0
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)
            quiet = 0 if ready else quiet + 1
            if quiet == 2 or (end is not None and perf_counter() > end):  # the second turn has polled sockets
                return

    def _abort(self, error: EngineError) -> None:
        """Fail every request, waiting ones too."""
        for lane in self._lanes.values():
            for request in lane.queue:
                if not request.future.done():
                    request.future.set_exception(error)
            lane.queue.clear()
            lane.fail(error)


def _check_params(params: SamplingParams) -> None:
    wrong = {
        "max_tokens": params.max_tokens < 1,
        "temperature": not 0 <= params.temperature < float("inf"),
        "top_p": not 0 < params.top_p <= 1,
        "top_k": params.top_k < 0,
        "top_logprobs": params.top_logprobs < 0,
    }
    for name, bad in wrong.items():
        if bad:
            raise RequestError(f"{getattr(params, name)!r} is out of range", param=name)
