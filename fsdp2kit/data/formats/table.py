"""The formats of rows with something to learn, by their names in ``data.format``.

Prompts, which the model answers itself, are read in `fsdp2kit.data.formats.prompts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase as Tokenizer

from fsdp2kit.config.data_formats import DataFormat
from fsdp2kit.data.columns import RowColumns, is_plain_text
from fsdp2kit.data.conversation import Conversation, PlainText, WholeText
from fsdp2kit.data.formats.alpaca import read_alpaca
from fsdp2kit.data.formats.chat import read_chat
from fsdp2kit.data.formats.preference import read_preference
from fsdp2kit.data.formats.prompt_completion import read_prompt_completion
from fsdp2kit.data.formats.text import read_text
from fsdp2kit.data.formats.tokens import LabelledTokens, read_labelled_tokens

Read = Conversation | PlainText | WholeText | LabelledTokens
"""What is tokenised, or is tokens already."""


class Format(NamedTuple):
    """How the rows of a format are read."""

    read: Callable[[RowColumns], Sequence[Read]]
    """A row → what is tokenised: one for each of its answers, or the documents of a row of tokens."""
    answers: int = 1
    """Documents of a row that are kept or dropped together: answers with their prompt. Of two, the better is first."""
    wraps: str | None = None
    """Our name of the column with the answer, if ``data.wrap`` puts the format's plain texts into the template."""
    asks_template: bool = True
    """Whether the chat template may render its rows."""


FORMATS: dict[DataFormat, Format] = {
    "chat": Format(read_chat),
    "alpaca": Format(read_alpaca),
    "prompt_completion": Format(read_prompt_completion, wraps="completion"),
    "preference": Format(read_preference, wraps="chosen", answers=2),
    "text": Format(read_text, asks_template=False),
    "tokens": Format(read_labelled_tokens, asks_template=False),
}


def looks_unwrapped(row: RowColumns, tokenizer: Tokenizer) -> bool:
    """Whether a row's prompt is a plain text without special tokens, although the tokenizer has a chat template."""
    column = FORMATS[row.section.format].wraps
    if column is None or row.section.wrap == "chat" or not tokenizer.chat_template:
        return False
    answer = row.whole.get(row.called(column))
    prompt = row.whole.get(row.called("prompt")) or answer  # which may begin with it
    if not (is_plain_text(prompt) and is_plain_text(answer)):
        return False
    return not any(token.special and token.content in prompt for token in tokenizer.added_tokens_decoder.values())
