"""One policy at work: its weights, its rows, its queue. Contract: `step` is synchronous and touches nothing outside.

A step makes room (compaction), admits waiting prompts, runs one forward pass over all decoding rows and the next
chunk of prompts, samples, and finishes what is done. Work per step is array work; Python touches single requests only
when they enter, leave, or are watched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from inspan.engine.attention import Segment, Span
from inspan.engine.base import Sample, SamplingParams, Watch
from inspan.engine.fixed import STEP, forward_fixed
from inspan.engine.forward import Batch, Rotary, forward
from inspan.engine.kv import KVPool
from inspan.engine.sampler import Draw, sample, top_logprobs
from inspan.engine.slots import Slots, State
from inspan.engine.spans import CALL_BYTES, cut
from inspan.engine.weights import Weights
from inspan.errors import EngineError
from inspan.trace.records import Tokens

RECUT = 8
"""Steps after which the decode block is cut into spans anew."""


@dataclass(slots=True)
class Counters:
    """What the engine did since it started."""

    prefilled_tokens: int = 0  # prompt tokens computed
    reused_tokens: int = 0  # prompt tokens taken from the prefix cache or from a twin's prefill
    decoded_tokens: int = 0  # tokens sampled
    steps: int = 0  # forward passes
    moved_rows: int = 0  # rows copied to keep the decode block dense
    idle_rows: int = 0  # holes carried through decode steps


@dataclass(slots=True, eq=False)
class Request:
    """One `sample` call on its way through a lane."""

    prompt: Tokens
    ids: np.ndarray  # the prompt, int64
    params: SamplingParams
    key: np.uint64
    limit: int  # most tokens to sample
    future: asyncio.Future[Sample]
    watch: Watch | None = None
    row: int = -1
    cached: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)  # (tokens sampled before it, version)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    twins: list[Request] = field(default_factory=list)  # same prompt, waiting for this one's prefill


class Lane:
    """Continuous batching for one policy."""

    def __init__(
        self,
        weights: Weights,
        *,
        version: int,
        active: int,
        rows: int,
        context: int,
        budget: int,
        counters: Counters,
        fixed: bool,
    ) -> None:
        self.version, self.active, self.counters, self.fixed = version, active, counters, fixed
        self.budget = budget  # bytes of KV that rows at rest give way to stay within
        self.slots = Slots(rows, context)
        self.queue: deque[Request] = deque()
        self.requests: list[Request | None] = [None] * rows
        self.weights, self.rotary = weights, Rotary(weights)
        self.pool = self._new_pool()
        # enough tokens to fill the machine, not so many that the event loop stalls
        self.chunk = int(min(max(8e9 / (2 * weights.spec.parameters), 64), 2048))
        self.next_token = np.zeros(rows, dtype=np.int64)
        self.produced = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)
        self.keys = np.zeros(rows, dtype=np.uint64)
        self.temperature = np.ones(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.stops = np.full((rows, 1), -1, dtype=np.int64)
        self.logprobs = np.zeros((rows, context), dtype=np.float32)
        self._busy = 0
        self._prefilling: list[Request] = []
        self._leaders: dict[Tokens, Request] = {}
        self._decoding = np.zeros(0, dtype=np.int64)
        self._special: list[Request] = []
        self._plain = True
        self._cut_cost = CALL_BYTES * weights.spec.layers / weights.spec.kv_bytes
        self._cuts, self._cuts_age = np.zeros(1, dtype=np.int64), 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.queue) or self._busy > 0

    def _new_pool(self) -> KVPool:
        return KVPool(self.weights.spec, rows=self.slots.rows, budget=self.budget, step=STEP if self.fixed else 64)

    def publish(self, weights: Weights, version: int) -> None:
        """Swap weights of the same shape in: running requests go on with their KV, cached prefixes are gone."""
        self.weights, self.version = weights, version
        self.slots.taint()
        self._leaders.clear()
        for request in self.requests:
            if request is not None:
                request.versions.append((int(self.produced[request.row]), version))

    def step(self) -> float:
        """Run one step; results and failures of single requests go to their futures.

        Returns the step's size (about the seconds a good core needs) when it only decoded, else 0.
        """
        with torch.inference_mode():
            self._compact()
            self._admit()
            return self._advance()

    def _advance(self) -> float:
        """One forward pass over what decodes and the next chunk of what is in prefill, and its consequences."""
        decoding = self._decoding
        block = int(decoding[-1]) + 1 if decoding.size else 0
        segments, finishing = self._chunks(block)
        batch = self._batch(block, segments, finishing)
        logits = (forward_fixed if self.fixed else forward)(self.weights, self.pool, self.rotary, batch)
        self.counters.steps += 1
        self.counters.idle_rows += block - decoding.size
        self.slots.length[decoding] += 1
        for s in segments:
            self.slots.length[s.row] += s.length
            self.counters.prefilled_tokens += s.length
        if logits.shape[0]:
            self._sample(logits, decoding, block, finishing)
        spec = self.weights.spec
        keys = sum((s.last - s.first) * s.reach for s in batch.spans)
        return 0.0 if segments else 5e-4 + block * spec.parameters * 2e-11 + keys * spec.kv_bytes * 1e-10

    def _compact(self) -> None:
        for busy, hole in self.slots.compaction():
            self._exchange(busy, hole)

    def _exchange(self, one: int, other: int) -> None:
        lengths = self.slots.length
        if lengths[other]:
            self.pool.swap(one, other, int(lengths[one]), int(lengths[other]))
        else:
            self.pool.copy(one, other, int(lengths[one]))
        self.slots.exchange(one, other)
        pair, reverse = [one, other], [other, one]
        for column in (self.next_token, self.produced, self.limit, self.keys, self.temperature, self.top_p):
            column[pair] = column[reverse]
        for column in (self.top_k, self.stops, self.logprobs):
            column[pair] = column[reverse]
        self.requests[one], self.requests[other] = self.requests[other], self.requests[one]
        for row in pair:
            request = self.requests[row]
            if request is not None:
                request.row = row
        self.counters.moved_rows += 1
        self._refresh()

    def _admit(self) -> None:
        waiting: list[Request] = []
        while self.queue and self._busy < self.active:
            request = self.queue.popleft()
            try:
                entered = self._enter(request)
            except Exception as error:
                self.queue.extendleft(reversed(waiting))
                _fail(request, EngineError(f"a request could not be admitted: {type(error).__name__}: {error}"))
                raise
            if not entered:
                waiting.append(request)
        self.queue.extendleft(reversed(waiting))

    def _enter(self, request: Request) -> bool:
        """Give a request a row; False: it is better off waiting for a neighbour's prefill."""
        leader = self._leaders.get(request.prompt)
        if leader is not None:
            row, source = self.slots.twin(request.ids), None
            leader.twins.append(request)
            request.cached = len(request.prompt)
        else:
            placement = self.slots.place(request.ids)
            if placement is None:
                return False
            row, source, request.cached = placement.row, placement.source, placement.reused
        self.counters.reused_tokens += request.cached
        self._fit(len(request.prompt) + 1, keep=source)
        if source is not None and source != row:
            self.pool.copy(source, row, request.cached)
        self._seat(request, row)
        if leader is None and request.cached == len(request.prompt) - 1:
            self._begin(request)
        elif leader is None:
            self._prefilling.append(request)
            self._leaders[request.prompt] = request
        return True

    def _begin(self, request: Request) -> None:
        """All but a prompt's last token is there: that token is fed like a sampled one."""
        self.slots.state[request.row] = State.DECODE
        self.next_token[request.row] = request.prompt[-1]
        self.counters.prefilled_tokens += 1
        self._refresh()

    def _fit(self, positions: int, keep: int | None = None) -> None:
        """Have at least so many positions. Longer rows are fewer rows: those at rest beyond the budget are given up.

        `keep` is at rest too, but is about to be copied from.
        """
        pool, slots = self.pool, self.slots
        if positions <= pool.positions:
            return
        positions = pool.grown(positions)
        slots.room = pool.affordable(positions)
        surplus = (slots.state == State.CACHED) & (np.arange(slots.rows) >= slots.room)
        if keep is not None:
            surplus[keep] = False
        slots.clear(surplus)
        pool.grow(positions, slots.length.tolist())

    def _seat(self, request: Request, row: int) -> None:
        params = request.params
        request.row, request.versions = row, [(0, self.version)]
        self.requests[row] = request
        self._busy += 1
        self.produced[row], self.limit[row], self.keys[row] = 0, request.limit, request.key
        self.temperature[row], self.top_p[row], self.top_k[row] = params.temperature, params.top_p, params.top_k
        if len(params.stop_ids) > self.stops.shape[1]:
            extra = len(params.stop_ids) - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, extra)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(params.stop_ids)] = params.stop_ids

    def _chunks(self, block: int) -> tuple[list[Segment], list[Request]]:
        """The next chunk of the prompts in prefill, and the requests whose prompts it completes."""
        segments: list[Segment] = []
        finishing: list[Request] = []
        at, left = block, self.chunk
        for request in self._prefilling:
            start, stop = int(self.slots.length[request.row]), len(request.prompt)
            size = min(stop - start, left)
            if size <= 0:
                break
            segments.append(Segment(at, size, request.row, start))
            at, left = at + size, left - size
            if start + size == stop:
                finishing.append(request)
        return segments, finishing

    def _batch(self, block: int, segments: list[Segment], finishing: list[Request]) -> Batch:
        slots = self.slots
        # an idle row's write lands where its next token will; one in prefill writes past its prompt
        lengths = np.where(slots.state[:block] == State.PREFILL, slots.target[:block], slots.length[:block])
        if block:
            self._fit(int(lengths.max()) + 1)
        if not segments:
            tokens, positions, rows, wanted = self.next_token[:block], lengths, np.arange(block), None
        else:
            spans = [slice(s.start, s.start + s.length) for s in segments]
            tokens = np.concatenate(
                [self.next_token[:block], *(slots.content[s.row, p] for s, p in zip(segments, spans, strict=True))]
            )
            positions = np.concatenate([lengths, *(np.arange(p.start, p.stop) for p in spans)])
            rows = np.concatenate([np.arange(block), *(np.full(s.length, s.row) for s in segments)])
            ends = {s.row: s.at + s.length - 1 for s in segments}
            last = [ends[r.row] for r in finishing for _ in range(1 + len(r.twins))]
            wanted = torch.from_numpy(np.concatenate([np.arange(block), np.array(last, dtype=np.int64)]))
        return Batch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            rows=torch.from_numpy(rows),
            block=block,
            spans=self._cut(block) if block else (),
            segments=segments,
            wanted=wanted,
        )

    def _cut(self, block: int) -> list[Span]:
        """Spans of the decode block; where they are cut is decided anew every few steps."""
        reach = np.ones(block, dtype=np.int64)  # holes need nothing
        reach[self._decoding] = self.slots.length[self._decoding] + 1
        most = int(reach.max())
        if block * most <= self._cut_cost:
            return [Span(0, block, most)]
        if self._cuts_age <= 0:
            self._cuts = cut(reach, self._cut_cost)
            self._cuts_age = RECUT
        self._cuts_age -= 1
        starts = self._cuts[self._cuts < block]
        longest = np.maximum.reduceat(reach, starts).tolist()
        edges = [*starts.tolist(), block]
        return [Span(a, b, r) for (a, b), r in zip(pairwise(edges), longest, strict=True)]

    def _sample(self, logits: torch.Tensor, decoding: np.ndarray, block: int, finishing: list[Request]) -> None:
        fresh = self._join(finishing)
        rows = np.concatenate([np.arange(block), fresh]) if fresh.size else slice(0, block)
        where = np.concatenate([decoding, np.arange(block, block + fresh.size)])  # holes have logits too
        busy = np.concatenate([decoding, fresh])
        if self._special:
            self._note_top(logits, dict(zip(busy.tolist(), where.tolist(), strict=True)))
        draw = Draw(
            keys=self.keys[rows],
            counters=self.produced[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            plain=self._plain,
        )
        ids, logprobs = sample(logits, draw)
        if busy.size != ids.size:
            ids, logprobs = ids[where], logprobs[where]
        self._record(busy, ids, logprobs)

    def _join(self, finishing: list[Request]) -> np.ndarray:
        """Requests whose prompts are complete begin to decode; twins get a copy of the prompt's KV. Their rows."""
        joined: list[int] = []
        for leader in finishing:
            for request in (leader, *leader.twins):
                if request is not leader:
                    self.pool.copy(leader.row, request.row, len(leader.prompt))
                    self.slots.length[request.row] = len(leader.prompt)
                self.slots.state[request.row] = State.DECODE
                joined.append(request.row)
            leader.twins.clear()
            self._unlead(leader)
        if joined:
            self._refresh()
        return np.array(joined, dtype=np.int64)

    def _refresh(self) -> None:
        """Recompute what follows from who decodes."""
        self._decoding = rows = np.flatnonzero(self.slots.state == State.DECODE)
        temperature = self.temperature[rows]
        cut = bool((self.top_p[rows] < 1).any() or (self.top_k[rows] > 0).any())
        self._plain = not cut and bool((temperature == 1).all())
        busy = [r for row in rows.tolist() if (r := self.requests[row]) is not None]
        self._special = [r for r in busy if r.watch is not None or r.params.top_logprobs]

    def _note_top(self, logits: torch.Tensor, where: dict[int, int]) -> None:
        for request in self._special:
            if request.params.top_logprobs:
                row = logits[where[request.row]]
                request.top.append(top_logprobs(row, request.params.temperature, request.params.top_logprobs))

    def _record(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Store the sampled tokens of busy rows, and finish what has ended."""
        produced = self.produced[rows]
        self.slots.content[rows, self.slots.length[rows]] = ids
        self.logprobs[rows, produced] = logprobs
        self.next_token[rows] = ids
        self.produced[rows] = produced + 1
        self.counters.decoded_tokens += rows.size
        stopped = (ids[:, None] == self.stops[rows]).any(axis=1)
        ended = stopped | (produced + 1 >= self.limit[rows])
        broken = ~np.isfinite(logprobs)
        changed = False
        for at in np.flatnonzero(ended | broken).tolist():
            request = self.requests[rows[at]]
            if request is not None:
                changed = True
                if broken[at]:
                    self._break(request)
                else:
                    self._watched(request)
                    self._finish(request, "stop" if stopped[at] else "length")
        for request in self._special:
            if request.row >= 0 and self._watched(request):
                changed = True
                self._finish(request, "stop")
        if changed:
            self._refresh()

    def _watched(self, request: Request) -> bool:
        """Show a request's watcher its newest token; a watcher that raises fails its own request only."""
        if request.watch is None or request.row < 0:
            return False
        try:
            return request.watch([int(self.next_token[request.row])])
        except Exception as error:
            self.remove(request)
            _fail(request, error)
            return False

    def _finish(self, request: Request, stop: str) -> None:
        row, count = request.row, int(self.produced[request.row])
        if row < 0:
            return
        begin = len(request.prompt)
        marks = [*request.versions, (count, -1)]
        versions = [v for (at, v), (end, _) in pairwise(marks) for _ in range(end - at)]
        result = Sample(
            tokens=tuple(self.slots.content[row, begin : begin + count].tolist()),
            logprobs=tuple(self.logprobs[row, :count].tolist()),
            versions=tuple(versions),
            stop=stop,
            top=tuple(request.top),
            cached_tokens=request.cached,
        )
        self._vacate(request)
        if not request.future.done():
            request.future.set_result(result)

    def _break(self, request: Request) -> None:
        """Logits were not finite: fail the request and leave nothing of it behind."""
        row = request.row
        self.slots.clean[row] = False
        self._vacate(request)
        self.pool.wipe(row)
        what = f"the logits are not finite at policy version {self.version}"
        _fail(request, EngineError(what, hint="have the weights diverged?"))

    def _vacate(self, request: Request) -> None:
        self.slots.release(request.row)
        self.requests[request.row], request.row = None, -1
        self._busy -= 1

    def _unlead(self, request: Request) -> None:
        if request in self._prefilling:
            self._prefilling.remove(request)
        if self._leaders.get(request.prompt) is request:
            del self._leaders[request.prompt]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is (cancelled, or its watcher failed); its row is free at once."""
        if request.row < 0:
            if request in self.queue:
                self.queue.remove(request)
            return
        for other in self._prefilling:
            if request in other.twins:
                other.twins.remove(request)
        for twin in request.twins:
            self._vacate(twin)
            self.counters.reused_tokens -= twin.cached
            self.queue.appendleft(twin)
        request.twins.clear()
        self._unlead(request)
        self._vacate(request)
        self._refresh()

    def fail(self, error: Exception) -> None:
        """A step raised: every request in a row fails, rows and KV are reset; what is queued stays queued."""
        for request in self.requests:
            if request is not None:
                _fail(request, error)
                request.row = -1
        self.reset()

    def reset(self) -> None:
        """Empty every row and give the KV's memory back."""
        self.requests = [None] * self.slots.rows
        self._busy = 0
        self._prefilling.clear()
        self._leaders.clear()
        self.slots.clear(np.ones(self.slots.rows, dtype=bool))
        self.pool = self._new_pool()
        self._refresh()


def _fail(request: Request, error: Exception) -> None:
    """Wake a request with an error, unless it is gone already."""
    if not request.future.done():
        request.future.set_exception(error)
