"""Formats of others: what their own validators accept, with nothing lost that they have a place for."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from test_verify import HELP, MAIN, rollout

from inspan.cli.export import Export, export
from inspan.errors import InputError
from inspan.tasks.base import Task
from inspan.trace.atif import atif_documents
from inspan.trace.otel import otlp_requests
from inspan.trace.records import Call, Node, Terminal, ToolCall, ToolEvent
from inspan.trace.store import TraceStore

TOOL = {"type": "function", "function": {"name": "assign", "parameters": {"type": "object"}}}


def swarm(**fields):
    """Two turns; the first calls a sub-agent, the second was sampled twice; a broken call, thinking, an error."""
    asked = [("c1", '{"to": "h"}'), ("c2", "{")]
    made_calls = [{"id": id, "name": "assign", "arguments": arguments} for id, arguments in asked]
    said = {"role": "assistant", "content": "On it.", "reasoning": "Hm.", "tool_calls": made_calls}
    nodes = [
        Node(0, "main", None, {"role": "system", "content": "s", "tools": [TOOL]}, (1,), 1),
        Node(1, "main", 0, {"role": "user", "content": "q"}, (2,), 1),
        Node(2, "main", 1, said, (3, 4, 5), 1, (-0.1, -0.2), (7, 7)),
        Node(3, "main", 2, {"role": "tool", "content": "r", "tool_call_id": "c1"}, (6,), 1),
        Node(4, "main", 3, {"role": "assistant", "content": "b"}, (3, 7), 1, (-0.3,), (8,)),
        Node(5, "main", 3, {"role": "assistant", "content": "c"}, (3, 8), 1, (-0.4,), (8,), "sampled again"),
        Node(6, "help", None, {"role": "user", "content": "h"}, (9,), 1),
        Node(7, "help", 6, {"role": "assistant", "content": "i"}, (3, 4), 1, (-0.5,), (0,)),
    ]
    tools = (ToolCall("c1", "assign", '{"to": "h"}'), ToolCall("c2", "assign", "{", "not JSON"))
    calls = [
        Call("m0", "main", 0, 1, 2, "tool_calls", tools, 3, 2, started=10.0, ended=11.0),
        Call("h0", "help", 0, 6, 7, "stop", (), 2, 1, started=11.5, ended=12.5),
        Call("m1", "main", 1, 3, 4, "stop", (), 6, 1, started=13.0, ended=14.0),
        Call("m2", "main", 2, 3, 5, "stop", (), 6, 1, started=14.0, ended=15.0),
    ]
    events = [ToolEvent("main", "c1", "assign", False, 0.1, "timed out")]
    made = {
        "nodes": nodes,
        "calls": calls,
        "sessions": [MAIN, HELP],
        "tool_events": events,
        "task": Task("t", "q", "a"),
    }
    return rollout(**{**made, **fields})


# ---- ATIF -------------------------------------------------------------------------------------------------------


def test_an_atif_document_is_valid_and_holds_ids_logprobs_and_sub_agents():
    atif = pytest.importorskip("atif", reason="atif is not installed (pip install atif)")
    (document,) = atif_documents([swarm()])
    read = atif.Trajectory.model_validate(json.loads(json.dumps(document)))
    assert [step.source for step in read.steps] == ["system", "user", "agent", "agent"]
    called = read.steps[2]
    assert called.metrics.completion_token_ids == [4, 5] and called.metrics.logprobs == [-0.1, -0.2]
    assert called.reasoning_content == "Hm." and called.metrics.extra["versions"] == [7, 7]
    assert called.tool_calls[0].arguments == {"to": "h"} and called.tool_calls[1].extra == {"raw_arguments": "{"}
    (result,) = called.observation.results
    assert (result.source_call_id, result.content) == ("c1", "r")
    names = [one.trajectory_id for one in read.subagent_trajectories]
    assert result.subagent_trajectory_ref[0].trajectory_id in names and len(set(names)) == len(names)
    assert read.agent.tool_definitions == [TOOL] and read.extra["task"] == "t"


def test_in_atif_each_sampled_token_is_fresh_in_exactly_one_trajectory():
    (document,) = atif_documents([swarm()])
    fresh = [
        step["metrics"]["completion_token_ids"]
        for one in (document, *document["subagent_trajectories"])
        for step in one["steps"]
        if "metrics" in step and not step.get("is_copied_context")
    ]
    assert sorted(fresh) == [[4], [4, 5], [7], [8]]
    tokens = [token for step in document["steps"] for token in step["extra"]["tokens"]]
    assert tokens == [1, 2, 3, 4, 5, 6, 3, 8], "the steps' ids are the last branch's"
    assert document["extra"]["fork"] == "sampled again"


def test_unfinished_shapes_make_valid_atif_too():
    atif = pytest.importorskip("atif", reason="atif is not installed (pip install atif)")
    stray = swarm()
    stray.nodes[3] = Node(3, "main", 2, {"role": "tool", "content": "r", "tool_call_id": "other"}, (6,), 1)
    for made in (stray, swarm(terminal=Terminal.FAILED, answer=None), rollout(task=None)):
        for document in atif_documents([made]):
            atif.Trajectory.model_validate(document)
    assert list(atif_documents([rollout(nodes=[], calls=[])])) == []


# ---- OpenTelemetry ----------------------------------------------------------------------------------------------


def spans_of(made, **options):
    (request,) = otlp_requests([made], **options)
    (scope,) = request["resourceSpans"][0]["scopeSpans"]
    return request, {span["name"] + "|" + span["spanId"]: span for span in scope["spans"]}, scope["spans"]


def attributes(span):
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


def test_spans_are_a_tree_by_sessions_and_tool_calls():
    _, _, spans = spans_of(swarm())
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans)
    helper = next(span for span in spans if span["name"] == "invoke_agent help")
    tool = by_id[helper["parentSpanId"]]
    assert tool["name"] == "execute_tool assign" and attributes(tool)["gen_ai.tool.call.id"] == "c1"
    assert tool["status"] == {"code": 2, "message": "timed out"}
    root = by_id[tool["parentSpanId"]]
    assert root["name"] == "invoke_agent main" and "parentSpanId" not in root
    assert attributes(root)["gen_ai.usage.output_tokens"] == "4"
    chats = [span for span in spans if span["name"].startswith("chat ")]
    assert [attributes(one)["gen_ai.operation.name"] for one in chats] == ["chat"] * 4
    assert attributes(chats[-1])["gen_ai.request.model"] == "policy@v0"
    for span in spans:
        above = by_id.get(span.get("parentSpanId", ""))
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        if above is not None:
            assert int(above["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
            assert int(span["endTimeUnixNano"]) <= int(above["endTimeUnixNano"])


def test_what_was_said_is_left_out_unless_asked_for():
    quiet, _, _ = spans_of(swarm())
    assert "On it." not in json.dumps(quiet) and "to" not in str(quiet["resourceSpans"][0].get("arguments"))
    _, _, spans = spans_of(swarm(), content=True)
    first = next(span for span in spans if span["name"] == "chat policy")
    (answer,) = json.loads(attributes(first)["gen_ai.output.messages"])
    assert [part["type"] for part in answer["parts"]] == ["reasoning", "text", "tool_call", "tool_call"]
    assert [one["role"] for one in json.loads(attributes(first)["gen_ai.input.messages"])] == ["system", "user"]


def test_opentelemetrys_own_messages_take_the_spans():
    pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed")
    from google.protobuf.json_format import Parse
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request, _, spans = spans_of(swarm(), content=True)
    for span in spans:  # OTLP's JSON has ids in hex where protobuf's own has base64
        for key in ("traceId", "spanId", "parentSpanId"):
            if key in span:
                span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    read = Parse(json.dumps(request), ExportTraceServiceRequest())
    assert len(read.resource_spans[0].scope_spans[0].spans) == len(spans)


@pytest.fixture
def run(tmp_path):
    with TraceStore(tmp_path / "trace.sqlite") as store:
        store.save(swarm(id="a"))
        store.save(swarm(id="b"))
    return tmp_path


class Collector(BaseHTTPRequestHandler):
    """Takes what is sent to /v1/traces."""

    got: ClassVar[list] = []
    headed: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).headed.append((self.headers["authorization"], self.headers["x-team"]))
        type(self).got.append((self.path, self.headers["content-type"], body))
        self.send_response(200 if len(self.got) < 3 else 503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def test_spans_are_sent_to_a_collector(run, capsys, monkeypatch):
    Collector.got, Collector.headed = [], []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc, x-team = a")
        export(run, Export("otel", endpoint=url))
        assert Collector.headed == [("Basic abc", "a")] * 2
        assert [(path, kind) for path, kind, _ in Collector.got] == [("/v1/traces", "application/json")] * 2
        assert "2 rollouts" in capsys.readouterr().out
        with pytest.raises(InputError, match="does not take them after 0 rollouts"):
            export(run, Export("otel", endpoint=url))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(InputError, match="does not take them"):
        export(run, Export("otel", endpoint=url))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization")
    with pytest.raises(InputError, match="headers are name=value"):
        export(run, Export("otel", endpoint=url))


def test_files_are_a_document_a_line(run):
    for fmt, key in (("atif", "schema_version"), ("otel", "resourceSpans")):
        export(run, Export(fmt))
        lines = (run / f"trace.{fmt}.jsonl").read_text().splitlines()
        assert len(lines) == 2 and all(key in json.loads(line) for line in lines)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Export("xml"), "unknown value 'xml'"),
        (Export("atif", "training"), "is a format of traces"),
        (Export("jsonl", content=True), "only spans"),
        (Export("atif", endpoint="http://x"), "only spans"),
        (Export("atif", out=Path("x.json")), "does not end in"),
    ],
)
def test_what_does_not_fit_together_is_told(run, options, expected):
    with pytest.raises(InputError, match=expected):
        export(run, options)
