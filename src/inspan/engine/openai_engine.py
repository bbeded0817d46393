"""Any OpenAI-compatible server, for frozen agents and judges. Contract: chat bodies pass through, nothing is trained.

Such a server gives no token ids, so this is not an `Engine`: what it says is recorded as text, never trained. Timeouts,
dropped connections, 429 and 5xx are retried with exponential backoff (the server's Retry-After wins); what remains is
an `EngineError`, which is infrastructure. A 4xx is the request's fault and comes back as a `RequestError`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from inspan.errors import EngineError, EngineOverloaded, RequestError

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses worth another try."""


class OpenAIChat:
    """A chat endpoint. `model`, when given, replaces the body's own; `sleep` is the clock that backoff uses.

    `http_client` is an `httpx2.AsyncClient` (for tests and in-process servers); without one, a client is made on first
    use and closed by `close`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        model: str | None = None,
        timeout_s: float = 120.0,
        retries: int = 4,
        backoff_s: float = 0.5,
        http_client: Any = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.base_url, self.model = base_url.rstrip("/"), model
        self._key, self._timeout, self._retries, self._backoff = api_key, timeout_s, retries, backoff_s
        self._client, self._own, self._sleep = http_client, http_client is None, sleep

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One chat completion: the server's JSON answer."""
        response = await self._send({**body, "stream": False})
        try:
            text = await self._read(response)
            answer = json.loads(text)
        except ValueError as error:
            raise EngineError(f"the server's answer is not JSON: {error}", where=self.base_url) from error
        finally:
            await response.aclose()
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise EngineError("the server's answer has no choices", where=self.base_url)
        return answer

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed chat completion. Retried only until the first chunk has come."""
        response = await self._send({**body, "stream": True})
        try:
            async for line in self._lines(response):
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                try:
                    yield json.loads(data)
                except ValueError as error:
                    raise EngineError(f"a chunk is not JSON: {error}", where=self.base_url) from error
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Close the client, if it is our own."""
        if self._own and self._client is not None:
            await self._client.aclose()
            self._client = None

    def _http(self) -> Any:
        if self._client is None:
            import httpx2

            self._client = httpx2.AsyncClient(timeout=self._timeout)
        return self._client

    async def _send(self, body: dict[str, Any]) -> Any:
        """An open response with status 200, after as many tries as it takes and is allowed."""
        import httpx2

        if self.model is not None:
            body["model"] = self.model
        client = self._http()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        fault: Exception | str = ""
        status = 0
        for attempt in range(self._retries + 1):
            wait = self._backoff * 2**attempt
            try:
                request = client.build_request(
                    "POST", f"{self.base_url}/chat/completions", json=body, headers=headers, timeout=self._timeout
                )
                response = await client.send(request, stream=True)
            except httpx2.TransportError as error:
                fault, status = error, 0
            else:
                if response.status_code == 200:
                    return response
                fault, status = await self._refusal(response), response.status_code
                wait = _retry_after(response.headers.get("retry-after"), wait)
            if attempt < self._retries:
                await self._sleep(wait)
        what = f"no answer after {self._retries + 1} tries; the last: {status or type(fault).__name__} {fault}"
        kind = EngineOverloaded if status == 429 else EngineError
        raise kind(what, where=self.base_url, hint="is the server up, and the key good?")

    async def _refusal(self, response: Any) -> str:
        """The message of a failed response; raises `RequestError` when another try cannot help."""
        try:
            text = (await self._read(response))[:2000]
        finally:
            await response.aclose()
        message, code = _message(text)
        if response.status_code not in RETRIED:
            raise RequestError(f"{self.base_url} refused: {message}", status=response.status_code, code=code)
        return message

    async def _read(self, response: Any) -> str:
        import httpx2

        try:
            return (await response.aread()).decode("utf-8", errors="replace")
        except httpx2.TransportError as error:
            raise EngineError(f"the connection broke: {error!r}", where=self.base_url) from error

    async def _lines(self, response: Any) -> AsyncIterator[str]:
        import httpx2

        try:
            async for line in response.aiter_lines():
                yield line
        except httpx2.TransportError as error:
            raise EngineError(f"the stream broke: {error!r}", where=self.base_url) from error


def _message(text: str) -> tuple[str, str | None]:
    """The error message and code of an OpenAI-shaped error body, else the text as it is."""
    try:
        error = json.loads(text).get("error")
    except (ValueError, AttributeError):
        return text.strip() or "no message", None
    if isinstance(error, dict):
        code = error.get("code")
        return str(error.get("message", text)), str(code) if code is not None else None
    return str(error or text), None


def _retry_after(value: str | None, otherwise: float) -> float:
    """Seconds of a Retry-After header (a number; dates fall back to our own backoff), at most a minute."""
    try:
        return min(max(float(value), 0.0), 60.0) if value is not None else otherwise
    except ValueError:
        return otherwise
