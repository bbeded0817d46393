"""The tiny base's tokenizer: byte-level BPE whose pieces never cross a space, so that a name is always the same tokens.

A tiny model copies by induction: it can only copy a name whose tokens do not depend on what stands before it. So
spaces, newlines, digits and punctuation are pieces of their own, and the scaffolding of a tool call is one token each.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD = "<|endoftext|>"
CONTROL = (PAD, "<|im_start|>", "<|im_end|>")
SCAFFOLD = (
    '<tool_call>\n{"name": "',
    '", "arguments": {"',
    '": "',
    '", "',
    '"}}\n</tool_call>',
    "Find the ",
    " of the ",
    " of ",
    " and ",
    "; ",
    " | ",
    "see also: ",
    "continued: ",
    "error: ",
    *(f"({number}) " for number in range(1, 13)),
)
_PIECES = Regex(r"\d|\s|[^\W\d_]+|_|[^\w\s]")


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train on texts; `size` is the whole vocabulary, control and scaffolding tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SCAFFOLD),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return add_scaffold(tokenizer, SCAFFOLD)


def add_scaffold(tokenizer: Tokenizer, texts: Iterable[str]) -> Tokenizer:
    """Give texts that come again and again a token each, after those that there are."""
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])
    return tokenizer


CHAT_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it as transformers reads it, with the renderer's name beside it."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token="<|im_end|>", bos_token=None, unk_token=None
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.init_kwargs["inspan_renderer"] = "chatml-compact"
    fast.save_pretrained(folder)
