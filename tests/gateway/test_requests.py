"""What comes in from outside: keys, paths, malformed and huge bodies, unknown fields."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai
import pytest
from gateway_fakes import ASK, MAIN, SEARCH, Desk, scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.errors import InputError, RequestError
from inspan.gateway.dialects.chat import CHAT
from inspan.gateway.transport import IN_PROCESS_URL, serve

GOOD = {"model": "main", "messages": ASK}


# ---- keys and paths ---------------------------------------------------------------------------------------------


async def ask_with(desk: Desk, headers: dict[str, str], path: str = "/v1/chat/completions") -> httpx2.Response:
    return await desk.http.post(IN_PROCESS_URL + path, json=GOOD, headers=headers)


async def test_the_key_is_taken_from_the_path_the_bearer_token_or_x_api_key():
    desk = Desk(scripted("yes"))
    key = desk.grant.key
    assert (await ask_with(desk, {}, f"/r/{key}/v1/chat/completions")).status_code == 200
    assert (await ask_with(desk, {"Authorization": f"Bearer {key}"})).status_code == 200
    assert (await ask_with(desk, {"authorization": f"bearer {key}"})).status_code == 200
    assert (await ask_with(desk, {"x-api-key": key})).status_code == 200


async def test_a_missing_or_wrong_key_is_a_401_in_the_openai_shape():
    desk = Desk(scripted("yes"))
    for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": desk.grant.key}, {"x-api-key": "ünïcode"}):
        answer = await ask_with(desk, {k: v.encode("latin-1") for k, v in headers.items()})  # type: ignore[dict-item]
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert (await ask_with(desk, {}, "/r/nope/v1/chat/completions")).status_code == 401
    assert (await desk.http.get(IN_PROCESS_URL + "/v1/models")).status_code == 401


async def test_keys_are_long_differ_and_are_not_shown():
    desk = Desk(scripted("yes"))
    keys = {desk.gateway.open(f"r{i}", roles=MAIN).key for i in range(50)} | {desk.grant.key}
    assert len(keys) == 51 and min(map(len, keys)) >= 32
    assert desk.grant.key not in repr(desk.grant)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/completions", 404),
        ("GET", "/", 404),
        ("GET", "/r//v1/models", 404),
    ],
)
async def test_other_paths_and_methods_have_the_openai_shape_too(method, path, status):
    answer = await Desk(scripted("yes")).http.request(method, IN_PROCESS_URL + path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# ---- bodies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"model": 5}, "model"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
    ],
)
async def test_a_malformed_field_is_a_400_that_names_it(change, param):
    answer = await Desk(scripted("yes")).post(GOOD | change)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b"[" * 100_000, b'{"n":' + b"9" * 5000 + b"}"]
)
async def test_a_body_that_is_no_json_object_is_a_400(raw):
    assert (await Desk(scripted("yes")).post(raw)).status_code == 400


async def test_unknown_fields_are_ignored():
    extra = {
        "user": "me",
        "metadata": {"a": 1},
        "seed": 4,
        "response_format": {"type": "text"},
        "frequency_penalty": 0.1,
    }
    messages = [m | {"name": "x", "cache_control": {}} for m in ASK]
    desk = Desk(scripted("yes"))
    answer = await desk.post(
        GOOD | extra | {"messages": messages, "stream_options": None, "parallel_tool_calls": False}
    )
    assert answer.status_code == 200
    await desk.post(GOOD)
    assert len([node for node in desk.seal().nodes if not node.sampled]) == 2, "nor do they make other messages"


async def test_lone_surrogates_do_not_break_anything():
    body = b'{"model":"main","messages":[{"role":"user","content":"a\\ud800b \\ud83d\\ude00"}]}'
    desk = Desk(scripted("yes"))
    assert (await desk.post(body)).status_code == 200
    assert desk.seal().nodes[0].message["content"] == "a\ufffdb 😀"


async def test_a_body_over_the_limit_is_a_413_whether_or_not_it_says_its_length():
    desk = Desk(scripted("yes"), max_body=1000)
    long = json.dumps(GOOD | {"user": "x" * 2000}).encode()
    assert (await desk.post(long)).status_code == 413

    async def pieces():
        for at in range(0, len(long), 100):
            yield long[at : at + 100]

    async with serve(desk.gateway.app) as url, httpx2.AsyncClient() as client:
        answer = await client.post(url + desk.grant.base_path + "/chat/completions", content=pieces())
        assert answer.status_code == 413
        assert (await client.get(url + desk.grant.base_path + "/models")).status_code == 200


async def test_twenty_megabytes_that_cannot_fit_are_refused_untokenised():
    desk = Desk(scripted("yes"))
    answer = await desk.post(GOOD | {"messages": [{"role": "user", "content": "hello world " * 1_700_000}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not desk.seal().nodes


async def test_megabytes_that_fit_are_taken_without_holding_up_others():
    desk = Desk(scripted("yes", context_length=10_000_000))
    long = GOOD | {"messages": [{"role": "user", "content": "hello world " * 100_000}]}
    other = desk.gateway.open("other", roles=MAIN)
    big = asyncio.ensure_future(desk.post(long))
    await asyncio.sleep(0)
    quick = 0
    while not big.done():
        answer = await desk.http.post(f"{IN_PROCESS_URL}{other.base_path}/chat/completions", json=GOOD)
        assert answer.status_code == 200
        quick += 1
    assert (await big).status_code == 200
    assert quick > 3


# ---- anything at all --------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.fixed_dictionaries(
    {}, optional={"id": JSON, "type": JSON, "function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON})}
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | JSON,
        "content": st.text(max_size=10) | JSON,
        "tool_calls": st.lists(CALLS, max_size=2) | JSON,
        "tool_call_id": st.text(max_size=5) | JSON,
        "name": JSON,
        "function_call": JSON,
    },
)
FUNCTION = st.fixed_dictionaries(
    {"name": st.text(max_size=5) | JSON},
    optional={"parameters": JSON | st.fixed_dictionaries({}, optional={"properties": JSON, "required": JSON})},
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["main", "", "other"]) | JSON,
        "messages": st.lists(MESSAGE, max_size=4) | JSON,
        "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}), max_size=2)
        | JSON,
        "tool_choice": st.sampled_from(["none", "auto"]) | JSON,
        "n": st.integers(0, 3) | JSON,
        "stop": st.text(max_size=3) | JSON,
        "stream": st.booleans() | JSON,
        "stream_options": JSON,
        "logprobs": st.booleans() | JSON,
        "top_logprobs": st.integers(-1, 30) | JSON,
        "max_tokens": st.integers(-1, 50) | JSON,
        "temperature": st.floats() | JSON,
        "top_p": st.floats() | JSON,
    },
)


@settings(max_examples=150, deadline=None)
@given(
    bodies=st.lists(BODY, min_size=1, max_size=4),
    headers=st.lists(st.sampled_from(["x-parent-call", "idempotency-key", "x-stainless-retry-count"]), max_size=2),
)
def test_whatever_is_sent_is_answered_and_never_with_a_500(bodies, headers):
    written = 'yes\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

    async def run():
        desk = Desk(scripted(written, "no"))
        for body in bodies:
            answer = await desk.http.post(
                f"{desk.url}/chat/completions", content=json.dumps(body).encode(), headers=dict.fromkeys(headers, "1")
            )
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
        assert desk.seal().complete

    asyncio.run(run())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_are_parsed_or_refused(raw):
    try:
        CHAT.parse(raw)
    except RequestError as error:
        assert error.status == 400


# ---- the loopback server ----------------------------------------------------------------------------------------


async def test_the_openai_client_works_over_the_loopback_server():
    desk = Desk(scripted("yes"))
    async with serve(desk.gateway.app) as url:
        client = desk.client(url=url)
        assert (await client.chat.completions.create(model="main", messages=ASK)).choices[0].message.content == "yes"
        with openai.OpenAI(base_url=url + desk.grant.base_path, api_key="any") as plain:
            answer = await asyncio.to_thread(plain.chat.completions.create, model="main", messages=ASK, tools=[SEARCH])
        assert answer.choices[0].message.content == "yes"


async def test_a_port_in_use_is_an_input_error_that_says_what_to_do():
    app = Desk(scripted("yes")).gateway.app
    async with serve(app) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(InputError, match=f"{port}.*another port"):
            async with serve(app, port=port):
                pass


async def test_a_host_that_others_reach_needs_a_key_that_every_request_carries():
    desk = Desk(scripted("yes"))
    with pytest.raises(InputError, match="key"):
        async with serve(desk.gateway.app, "0.0.0.0"):
            pass
    async with serve(desk.gateway.app, "0.0.0.0", key="server-key") as url, httpx2.AsyncClient() as client:
        url = url.replace("0.0.0.0", "127.0.0.1") + desk.grant.base_path + "/chat/completions"
        assert (await client.post(url, json=GOOD)).status_code == 401
        assert (await client.post(url, json=GOOD, headers={"Authorization": "Bearer nope"})).status_code == 401
        assert (await client.post(url, json=GOOD, headers={"Authorization": "Bearer server-key"})).status_code == 200
