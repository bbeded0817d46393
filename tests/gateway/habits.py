"""Real tokenizers, the templates that models put over them, and a harness that talks through a gateway on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gateway_fakes import Desk, audit, returned
from real_bpe import real as real_bpe
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from inspan.engine.scripted import ScriptedEngine
from inspan.gateway.base import Trace
from inspan.gateway.template import TemplateRenderer
from inspan.trace.graph import FORK_REASONS

_MARKUP = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
QWEN3 = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text()
"""Qwen3's template: it drops the thinking of turns before the last user message."""
OPENS = QWEN3.replace("assistant\\n' }}\n    {%- if enable", "assistant\\n<think>\\n' }}\n    {%- if enable")
"""The same, with a generation prompt that opens the thinking."""
LOOSE = QWEN3.replace("call.function.arguments | tojson", "call.function.arguments")
"""The same, with tool arguments as Python writes them: `False`, single quotes."""


@cache
def _bare(name: str) -> str:
    made = real_bpe(name)
    if name == "qwen":
        made = Tokenizer.from_str(made.to_str())
        made.normalizer = normalizers.NFC()
        made.add_tokens([AddedToken(word, special=False, normalized=False) for word in _MARKUP.split()])
    return made.to_str()


@cache
def real(name: str, template: str = QWEN3) -> PreTrainedTokenizerFast:
    """A real tokenizer under a template: "smollm2" (thinking and calls are plain text) or "qwen" (they are tokens)."""
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bare(name)), eos_token="<|im_end|>")
    made.chat_template = template
    return made


def call(arguments: Any, name: str = "look", **spelling: Any) -> str:
    """A tool call as a model writes it; `arguments` as text are written as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, **spelling)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


class Talk:
    """A harness in conversation with a scripted model over a real tokenizer.

    Replies are texts (an end of turn is added) or token ids (as they are).
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *replies: str | Sequence[int], renderer: Any = None, **options: Any
    ) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer or TemplateRenderer(tokenizer)
        self.sampled = [self.ids(one) if isinstance(one, str) else list(one) for one in replies]
        self.desk = Desk(ScriptedEngine(self.sampled, context_length=131072), renderer=self.renderer, **options)
        self.heard = self.desk.engine.heard
        self.messages: list[dict[str, Any]] = []

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        """What a model samples to say a text."""
        ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return [*ids, self.tokenizer.eos_token_id] if end else ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return self.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)

    def control(self, word: str) -> int:
        """The id of a control token."""
        return self.tokenizer.convert_tokens_to_ids(word)

    async def user(self, content: str, **options: Any) -> Any:
        """Say something, and take the answer into the history."""
        return await self.say({"role": "user", "content": content}, **options)

    async def tool(self, reply: Any, content: str = "found", **options: Any) -> Any:
        """Answer each call of a reply, and take the answer to that into the history."""
        calls = reply.choices[0].message.tool_calls
        return await self.say(
            *({"role": "tool", "tool_call_id": one.id, "content": content} for one in calls), **options
        )

    async def say(self, *messages: dict[str, Any], **options: Any) -> Any:
        """Send these messages after the history, and take the answer in as a harness does that keeps no thinking."""
        self.messages += messages
        reply = await self.desk.ask(list(self.messages), tools=[LOOK], **options)
        self.messages.append(returned(reply))
        return reply

    def seal(self) -> Trace:
        """What was recorded, after a check that holds for every habit: each call's prompt is what its path holds, every
        sample is kept as it was, every sampled token is trained in exactly one chain, and reasons are known ones."""
        trace = self.desk.seal()
        assert trace.complete
        assert len(trace.calls) == len(self.heard)
        audit(self.desk, trace)
        assert {node.fork for node in trace.nodes} <= {None, *FORK_REASONS}
        return trace


def forks(trace: Trace) -> list[str]:
    """The reasons of the forks, in order."""
    return [node.fork for node in trace.nodes if node.fork]
