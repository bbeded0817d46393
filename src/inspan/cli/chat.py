"""`inspan chat`: a built-in agent outside training, against any OpenAI-compatible server.

The very code that is trained runs here: the same prompts, tools and limits, through the same client.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from inspan.errors import EngineError, InputError
from inspan.stopping import run_until_stopped

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Where to ask, and how."""

    agent: str
    base_url: str
    question: str
    api_key: str | None = None
    model: str | None = None
    subagent_model: str | None = None
    corpus: Path | None = None
    critical_steps: int = 14
    width: int = 16
    max_tokens: int = 512
    quiet: bool = False
    limit: int = 0  # of the search agent's view, in tokens; 0: Context-1's
    tokenizer: Path | None = None  # to count them by; None: an estimate


def chat(settings: ChatSettings) -> None:
    """Ask one question and print the answer; tool calls are shown on stderr as they happen.

    Raises InputError when the server cannot be reached, refuses the key, or has not the model, and EngineError for an
    answer that cannot be read or is empty.
    """
    print(run_until_stopped(ask(settings)))


async def ask(settings: ChatSettings) -> str:
    """The agent's answer."""
    import openai

    from inspan.harness import single, swarm
    from inspan.harness.base import Context, Endpoint
    from inspan.harness.search import agent as search
    from inspan.tasks.base import Task

    agents = {"swarm": swarm.run, "single": single.run, "search": search.run}
    if settings.agent not in agents:
        raise InputError(f"unknown agent {settings.agent!r}", hint=f"known: {', '.join(agents)}")
    events: list = []
    tools = _tools(settings)
    key = settings.api_key or os.environ.get("OPENAI_API_KEY") or "none"
    where = settings.base_url
    _check(where, key, [settings.question, settings.model or "", settings.subagent_model or ""])
    try:
        async with openai.AsyncOpenAI(base_url=where, api_key=key, max_retries=1) as client:
            model = settings.model or await _only_model(client, where)
        first = Endpoint(where, key, model)
        second = Endpoint(where, key, settings.subagent_model or model)
        endpoints = {"main": first, "orchestrator": first, "subagent": second}
        options = _options(settings)
        context = Context(endpoints, tools, settings.critical_steps, None, settings.max_tokens, options, events)
        answer = await agents[settings.agent](Task("chat", settings.question, None), context)
    except openai.APIConnectionError as error:
        raise InputError(
            f"cannot reach the server: {error.__cause__ or error}", where=where, hint="check --base-url"
        ) from None
    except openai.AuthenticationError:
        raise InputError("the server refuses the key", where=where, hint="give --api-key or OPENAI_API_KEY") from None
    except openai.NotFoundError as error:
        raise InputError(
            f"not found: {error.message}", where=where, hint="check --base-url (…/v1) and --model"
        ) from None
    except openai.APIStatusError as error:
        raise InputError(f"the server answered {error.status_code}: {error.message}", where=where) from None
    if not answer.strip():
        raise EngineError("the model gave an empty answer", where=where, hint="ask again, or raise --max-tokens")
    return answer


def _tools(settings: ChatSettings) -> Any:
    """The tools over the corpus, if there is one; the search agent cannot do without."""
    from inspan.harness.search.corpus_tools import CorpusTools
    from inspan.harness.tools import Library, LibraryTools
    from inspan.retrieval.corpus import load_corpus
    from inspan.retrieval.memory import open_corpus

    if settings.agent == "search":
        if settings.corpus is None:
            raise InputError("the search agent needs a corpus", hint="give --corpus: documents, or an index of them")
        return CorpusTools(open_corpus(settings.corpus), on_event=_Teller(settings.quiet))
    if settings.corpus is None:
        return None
    return LibraryTools(Library.of(load_corpus(settings.corpus)), snippet_chars=160, on_event=_Teller(settings.quiet))


def _options(settings: ChatSettings) -> dict[str, Any]:
    from inspan.config.search import Search

    options: dict[str, Any] = {"width": settings.width, "search": Search(limit=settings.limit)}
    return options | ({"tokenizer": str(settings.tokenizer)} if settings.tokenizer else {})


def _check(where: str, key: str, texts: Sequence[str]) -> None:
    """Raise InputError for what no request can carry."""
    try:
        parts = urlsplit(where)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        where.encode("ascii")
    except ValueError:  # a port that is none, brackets that do not close, letters that an address has not
        sound = False
    if not sound:
        raise InputError(f"{where!r} is no address of a server", where="--base-url",
                         hint="for example http://127.0.0.1:8000/v1")  # fmt: skip
    if not (key.isascii() and key.isprintable()):
        raise InputError("a key has ASCII letters only", where="--api-key or OPENAI_API_KEY")
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"not valid UTF-8: {text!r}", where="the command line") from None


async def _only_model(client: openai.AsyncOpenAI, where: str) -> str:
    """The one model that a server offers; InputError listing them when there are more."""
    try:
        reply: Any = await client.get("/models", cast_to=object)
        names = [str(model["id"]) for model in reply["data"]]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise EngineError("the server's list of models cannot be read", where=where, hint="give --model") from error
    if len(names) == 1:
        return names[0]
    offered = ", ".join(names[:12]) or "none"
    raise InputError(f"the server offers {len(names)} models: {offered}", where=where, hint="choose one with --model")


class _Teller:
    """Shows tool calls as they happen."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def __call__(self, event) -> None:
        if not self.quiet:
            state = "" if event.ok else f": {event.detail}"
            print(f"  {event.session or 'main'} {event.name}{state}", file=sys.stderr)
