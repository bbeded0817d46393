"""Whatever a harness does to its history, the exports of what was recorded are valid and lose nothing."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
from typing import Any

import pytest
from gateway_fakes import Desk, scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_hostile import ROLES, SAYS, hostile

from inspan.engine.base import SamplingParams
from inspan.gateway.base import Limits
from inspan.trace.atif import atif_documents
from inspan.trace.otel import otlp_requests
from inspan.trace.records import Rollout, Terminal


def recorded(seed: int) -> Rollout:
    """A hostile session, as a rollout; the clock moves by a second each time that it is read."""
    rng = random.Random(seed)
    ticks = itertools.count(1_700_000_000)
    desk = Desk(
        scripted(*(rng.choice(SAYS) for _ in range(40))), roles=ROLES, sampling=SamplingParams(rng.choice([3, 300])),
        limits=rng.choice([Limits(), Limits(calls=5), Limits(tokens=150)]), clock=lambda: float(next(ticks)),
    )  # fmt: skip
    asyncio.run(hostile(rng, desk))
    trace = desk.seal()
    return Rollout("r", {"id": "t"}, "g", 0, Terminal.COMPLETED, "x", trace.sessions, trace.nodes, trace.calls)


many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 2**32)


@many
@given(seed=SEEDS)
def test_atif_is_valid_refers_to_what_is_there_and_tells_each_sampled_token_once(seed: int) -> None:
    atif = pytest.importorskip("atif", reason="atif is not installed (pip install atif)")
    rollout = recorded(seed)
    documents = list(atif_documents([rollout]))
    assert len(documents) == bool(rollout.nodes)
    for document in documents:
        atif.Trajectory.model_validate(json.loads(json.dumps(document)))
        parts = [document, *document.get("subagent_trajectories", ())]
        names = [part["trajectory_id"] for part in parts]
        assert len(set(names)) == len(names)
        fresh: list[tuple[int, list[int], list[float]]] = []
        for part in parts:
            steps = part["steps"]
            for step in steps:
                for result in step.get("observation", {}).get("results", ()):
                    assert all(ref["trajectory_id"] in names for ref in result.get("subagent_trajectory_ref", ()))
                if "metrics" in step and "is_copied_context" not in step:
                    told = step["metrics"]
                    fresh.append((step["extra"]["node"], told["completion_token_ids"], told["logprobs"]))
                    assert step["timestamp"].startswith("2023-11-1")
        sampled = [(n.id, list(n.tokens[n.start :]), list(n.logprobs)) for n in rollout.nodes if n.sampled]
        assert sorted(fresh) == sampled
        sums = [part["final_metrics"]["total_completion_tokens"] for part in parts]
        assert (
            sum(sums) == sum(call.completion_tokens for call in rollout.calls) == document["extra"]["completion_tokens"]
        )


@many
@given(seed=SEEDS, content=st.booleans())
def test_spans_are_one_tree_in_time_that_opentelemetry_reads(seed: int, content: bool) -> None:
    pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed")
    from google.protobuf.json_format import Parse
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    rollout = recorded(seed)
    requests = list(otlp_requests([rollout], content=content))
    spans: list[dict[str, Any]] = [
        span for one in requests for scope in one["resourceSpans"][0]["scopeSpans"] for span in scope["spans"]
    ]
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans)
    chats = [span for span in spans if span["name"].startswith("chat ")]
    assert len(chats) == len(rollout.calls)
    for span in spans:
        above = by_id.get(span.get("parentSpanId", ""))
        assert ("parentSpanId" in span) == (above is not None)
        start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        assert 1_700_000_000 * 10**9 <= start <= end
        if above is not None:
            assert int(above["startTimeUnixNano"]) <= start and end <= int(above["endTimeUnixNano"]), span["name"]
    for span in spans:
        told = {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}
        assert ("error.type" in told) == ("status" in span)
        for message in json.loads(told.get("gen_ai.output.messages", "[]")):
            assert message["role"] == "assistant" and message["finish_reason"] in ("stop", "length", "tool_call")
        for key in ("traceId", "spanId", "parentSpanId"):  # OTLP's JSON has ids in hex where protobuf's has base64
            if key in span:
                span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    for request in requests:
        Parse(json.dumps(request), ExportTraceServiceRequest())
