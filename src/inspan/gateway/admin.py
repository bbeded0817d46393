"""The admin API: letting rollouts in, looking at them, sealing them. Contract: its key opens no model, and no rollout's
key opens it; it is a door of its own in front of a gateway's application.

    POST /admin/v1/rollouts                 {"id"?, "roles"?, "limits"?, "pace"?, "sampling"?, "seed"?, "default_role"?}
    GET  /admin/v1/rollouts                 those that are open
    GET  /admin/v1/rollouts/<id>            what was recorded so far
    GET  /admin/v1/rollouts/<id>/messages   the same, a row a message (JSONL, as `inspan export`)
    POST /admin/v1/rollouts/<id>/seal       {"answer"?, "terminal"?}: let nothing more in
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from inspan.errors import InputError, InspanError, RequestError, StoreError
from inspan.gateway.base import Trace
from inspan.gateway.gateway import Gateway
from inspan.gateway.grants import Terms, key_hash
from inspan.trace.export import trace_rows
from inspan.trace.records import Rollout, Terminal
from inspan.trace.store import Stored, TraceStore

_PREFIX: Final = "/admin/v1/rollouts"
_MOST: Final = 1 << 20  # bytes of a body
_ENDS: Final = {one.value: one for one in Terminal}
_log = logging.getLogger("inspan.gateway")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Admin:
    """An ASGI application: the admin API for its key, and the gateway's for everything else.

    `defaults` are the terms of rollouts whose request names none.
    """

    def __init__(self, gateway: Gateway, store: TraceStore, key: str, defaults: Terms | None = None) -> None:
        self._defaults = {} if defaults is None else defaults.to_json()
        self._gateway, self._store, self._app = gateway, store, gateway.app
        self._key = key_hash(key)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = str(scope.get("path", ""))
        if scope["type"] != "http" or not (path == "/admin" or path.startswith("/admin/")):
            await self._app(scope, receive, send)
            return
        try:
            self._admit(dict(scope["headers"]))
            body = await _body(receive) if scope["method"] == "POST" else {}
            status, kind, answer = self._serve(scope["method"], path, body)
        except InspanError as error:
            status, kind, answer = _refused(error)
        except Exception:
            _log.exception("an admin request failed")
            status, kind, answer = 500, _JSON, _error("the gateway failed; its log says how")
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _admit(self, headers: Mapping[bytes, bytes]) -> None:
        given = headers.get(b"authorization", b"").partition(b" ")[2].strip() or headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(key_hash(given.decode("latin-1")), self._key):
            raise RequestError("the admin key is missing or wrong", status=401, code="invalid_api_key")

    def _serve(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes, bytes]:
        rest = path.removeprefix(_PREFIX)
        name, _, verb = rest.removeprefix("/").partition("/")
        if path.startswith(_PREFIX) and rest in ("", "/"):
            if method == "POST":
                return 201, _JSON, _encode(self._open(body))
            if method == "GET":
                return 200, _JSON, _encode({"rollouts": [rollout for rollout, _ in self._store.open_grants()]})
        elif path.startswith(f"{_PREFIX}/"):
            if method == "POST" and verb == "seal":
                return 200, _JSON, _encode(self._seal(name, body))
            if method == "GET" and verb == "":
                return 200, _JSON, _encode(self._summary(name))
            if method == "GET" and verb == "messages":
                return 200, b"application/x-ndjson", self._messages(name)
        raise RequestError(f"Not Found: {method} {path:.200}", status=404)

    def _open(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.pop("id", None) or secrets.token_hex(8)
        if not isinstance(name, str) or not name.isprintable() or "/" in name or len(name) > 200:
            raise InputError(f"{name!r:.80} is no id: a printable text without slashes", where="id")
        terms = Terms.from_json({**self._defaults, **body})
        grant = self._gateway.open(
            name,
            roles=terms.roles,
            limits=terms.limits,
            seed=terms.seed,
            sampling=terms.sampling,
            default_role=terms.default_role,
            pace=terms.pace,
        )
        return {"id": grant.rollout, "key": grant.key, "base_path": grant.base_path}

    def _recorded(self, name: str) -> Stored:
        live = self._gateway.known(name)
        if live is not None:
            live.settle()
        return self._store.load(name)

    def _summary(self, name: str) -> dict[str, Any]:
        sessions, nodes, calls = self._recorded(name)
        return {
            "id": name,
            "open": name in dict(self._store.open_grants()),
            "sessions": [
                {"id": s.id, "agent": s.agent, "policy": s.policy, "trainable": s.trainable} for s in sessions
            ],
            "calls": len(calls),
            "sampled_tokens": sum(call.completion_tokens for call in calls),
            "forks": sum(node.fork is not None for node in nodes),
        }

    def _messages(self, name: str) -> bytes:
        rollout = _rollout(name, self._recorded(name), Terminal.CANCELLED, None)
        return b"".join(json.dumps(row).encode() + b"\n" for row in trace_rows([rollout]))

    def _seal(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        answer, end = body.get("answer"), _ENDS.get(str(body.get("terminal", "completed")))
        if end is None or not (answer is None or isinstance(answer, str)):
            raise InputError(f"terminal is one of {', '.join(_ENDS)}; answer is a text", where="body")
        if name not in dict(self._store.open_grants()):
            raise RequestError(f"rollout {name!r:.80} is not open", status=409)
        trace: Trace | None = self._gateway.seal(name) if self._gateway.known(name) is not None else None
        self._store.seal_grant(name)
        stored = self._store.load(name)
        rollout = _rollout(name, stored, end, answer)
        rollout.fingerprint = self._gateway.watch.id if self._gateway.watch else ""
        rollout.complete = all(call.ok for call in stored.calls) and (trace is None or trace.complete)
        self._store.finish(rollout)
        return self._summary(name)


_JSON: Final = b"application/json"


def _rollout(name: str, stored: Stored, end: Terminal, answer: str | None) -> Rollout:
    return Rollout(name, {}, "", 0, end, answer, stored.sessions, stored.nodes, stored.calls)


async def _body(receive: Receive) -> dict[str, Any]:
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if len(data) > _MOST:
            raise RequestError(f"the body is longer than {_MOST} bytes", status=413)
        if not message.get("more_body", False):
            break
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


def _refused(error: InspanError) -> tuple[int, bytes, bytes]:
    if isinstance(error, RequestError):
        status = error.status
    elif isinstance(error, StoreError):
        status = 404 if error.what.startswith("there is no rollout") else 409 if "before" in error.what else 503
    else:
        status = 400 if isinstance(error, InputError) else 503
    return status, _JSON, _error(error.what, error.where)


def _error(what: str, where: str | None = None) -> bytes:
    return _encode({"error": {"message": what, "param": where}})


def _encode(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace")
