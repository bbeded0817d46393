"""`inspan chat` runs the very agents that are trained, against an ordinary server."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from inspan.cli.chat import ChatSettings, chat
from inspan.errors import EngineError, InputError
from inspan.retrieval.corpus import load_corpus
from inspan.retrieval.index import update


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server that plays a script: an orchestrator with one sub-agent."""

    daemon_threads = True

    def __init__(self, models=("only",)):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = models
        self.requests: list[tuple] = []
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def stop(self):
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def _send(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._send(
            {
                "object": "list",
                "data": [{"id": m, "object": "model", "created": 0, "owned_by": "x"} for m in self.server.models],
            }
        )

    def do_POST(self):
        if self.headers["Authorization"] == "Bearer wrong":
            return self._send({"error": {"message": "bad key"}}, 401)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.headers, body))
        if body["model"] == "missing":
            return self._send({"error": {"message": "no such model"}}, 404)
        message = {"role": "assistant", **play(body["messages"], self.headers.get("X-Parent-Call"))}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        self._send({"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]})


def call(id, name, /, **arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def play(messages, parent):
    results = [m["content"] for m in messages if m["role"] == "tool"]
    if parent is None and not results:
        made = [call("c1", "create_subagent", name="a", system_prompt="Look it up.")]
        return {
            "content": None,
            "tool_calls": [*made, call("c2", "assign_task", agent="a", prompt="Capital of Niger?")],
        }
    if parent is None:
        return {"content": f"The swarm says: {results[-1]}"}
    if not results:
        return {"content": None, "tool_calls": [call("s1", "search", query="Niger capital")]}
    return {"content": f"found: {results[-1]}"}


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "niger.md").write_text("Niger\nThe capital of Niger is Niamey.")
    (tmp_path / "nigeria.md").write_text("Nigeria\nThe capital of Nigeria is Abuja.")
    return tmp_path


def test_the_swarm_answers_through_its_sub_agent(server, corpus, capsys):
    chat(ChatSettings("swarm", server.url, "What is the capital of Niger?", corpus=corpus))
    out = capsys.readouterr()
    assert "The swarm says: found:" in out.out and "Niamey" in out.out
    assert "search" in out.err
    parents = [headers.get("X-Parent-Call") for headers, _ in server.requests]
    assert parents == [None, "c2", "c2", None]
    assert {body["model"] for _, body in server.requests} == {"only"}


def test_sub_agents_may_use_another_model(server, corpus):
    chat(ChatSettings("swarm", server.url, "?", model="big", subagent_model="small", corpus=corpus, quiet=True))
    assert [body["model"] for _, body in server.requests] == ["big", "small", "small", "big"]


def test_the_search_agent_lists_chunks_of_a_folder_or_an_index(server, corpus, tmp_path_factory, capsys, monkeypatch):
    def searcher(messages, parent):
        found = [m["content"] for m in messages if m["role"] == "tool"]
        if not found:
            return {"content": None, "tool_calls": [call("s1", "search_corpus", query="Niger capital")]}
        return {"content": "niger.md#0: it says so" if "[niger.md#0]" in found[0] else found[0]}

    monkeypatch.setattr(sys.modules[__name__], "play", searcher)
    index = tmp_path_factory.mktemp("index")
    update(index, load_corpus(corpus))
    for place in (corpus, index):
        chat(ChatSettings("search", server.url, "What is the capital of Niger?", corpus=place, limit=2000))
        assert capsys.readouterr().out == "niger.md#0: it says so\n"
    assert "[Token usage: " in server.requests[-1][1]["messages"][-1]["content"]
    with pytest.raises(InputError, match="needs a corpus"):
        chat(ChatSettings("search", server.url, "What is the capital of Niger?"))


def test_one_of_several_models_must_be_named(server):
    server.models = ("a", "b")
    with pytest.raises(InputError, match="offers 2 models: a, b"):
        chat(ChatSettings("single", server.url, "?"))


@pytest.mark.parametrize(
    ("settings", "text"), [({"api_key": "wrong"}, "refuses the key"), ({"model": "missing"}, "no such model")]
)
def test_what_the_server_refuses_is_explained(server, settings, text):
    with pytest.raises(InputError, match=text):
        chat(ChatSettings("single", server.url, "?", **{"model": "only", **settings}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "http://127.0.0.1:99999/v1"},
        {"base_url": "http://127.0.0.1:port/v1"},
        {"base_url": "127.0.0.1:8000"},
        {"base_url": "ftp://127.0.0.1/v1"},
        {"base_url": "http://[::1/v1"},
        {"base_url": ""},
        {"api_key": "schlüssel"},
        {"api_key": "two\nlines"},
        {"question": "\udcff"},
        {"model": "\ud800"},
    ],
)
def test_what_no_request_can_carry_is_named_before_one_is_made(wrong):
    settings = {"agent": "single", "base_url": "http://127.0.0.1:1/v1", "question": "?", **wrong}
    with pytest.raises(InputError, match=r"address|ASCII|UTF-8"):
        chat(ChatSettings(**settings))


@pytest.mark.parametrize(
    "answer",
    [
        None, 7, [], "text", {}, {"choices": []}, {"choices": [None]}, {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": 5}}]}, {"choices": [{"message": {"content": [1]}}]},
        {"choices": [{"message": {"tool_calls": 5}}]}, {"choices": [{"message": {"tool_calls": [{}]}}]},
        {"choices": [{"message": {"tool_calls": [{"function": {"name": None}}]}}]},
        b"{broken", b"\xff\xfe", b"[" * 100_000, b"",
    ],
)  # fmt: skip
@pytest.mark.parametrize("agent", ["single", "swarm"])
def test_an_answer_that_cannot_be_read_is_an_error_of_the_servers(server, monkeypatch, answer, agent):
    def send(self, body, status=200):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    monkeypatch.setattr(Handler, "_send", send)
    with pytest.raises(EngineError, match="answer"):
        chat(ChatSettings(agent, server.url, "?", model="only"))
    with pytest.raises(EngineError, match="list of models"):
        chat(ChatSettings(agent, server.url, "?"))


PAGES = ("niger.md", "nigeria.md")


def says(monkeypatch, play):
    monkeypatch.setattr(__import__(__name__), "play", play)


def test_an_empty_answer_is_an_error(server, monkeypatch):
    says(monkeypatch, lambda messages, parent: {"content": " \n"})
    with pytest.raises(EngineError, match="empty answer"):
        chat(ChatSettings("single", server.url, "?"))


def test_a_sub_agent_whose_answer_cannot_be_read_does_not_end_the_swarm(server, monkeypatch, capsys):
    plain = play

    def spoilt(messages, parent):
        return plain(messages, parent) if parent is None else {"content": {"no": "text"}}

    says(monkeypatch, spoilt)
    chat(ChatSettings("swarm", server.url, "?", quiet=True))
    assert "error: the sub-agent failed" in capsys.readouterr().out


@pytest.mark.parametrize("ids", [("same", "same"), (None, None), ("", 7), ("call_1", None)])
def test_two_calls_without_ids_of_their_own_get_their_own_results(server, corpus, monkeypatch, capsys, ids):
    def two(messages, parent):
        if messages[-1]["role"] == "tool":
            found = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
            order = [c["id"] for m in messages if m["role"] == "assistant" for c in m["tool_calls"]]
            return {"content": " | ".join(found[one] for one in order)}
        return {"content": None, "tool_calls": [call(one, "read", page=p) for one, p in zip(ids, PAGES, strict=True)]}

    says(monkeypatch, two)
    chat(ChatSettings("single", server.url, "?", corpus=corpus, quiet=True))
    first, second = capsys.readouterr().out.split(" | ")
    assert "Niamey" in first and "Abuja" in second
