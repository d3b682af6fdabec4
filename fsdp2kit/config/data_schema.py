"""The TOML's sections about data: where rows are, what they contain, and how long they may be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from fsdp2kit.config.section import FunctionPath, InputPath, Section

DataFormat = Literal[
    "chat", "prompt_completion", "alpaca", "text", "tokens", "preference", "prompts", "rows", "synthetic"
]
Overlong = Literal["truncate", "drop", "split", "error"]

_OPTIONS = ("system", "tools", "chat_template_kwargs")
# The columns that each format reads.
COLUMNS: dict[DataFormat, tuple[str, ...]] = {
    "chat": ("messages", "conversations", "loss_mask", *_OPTIONS),
    "prompt_completion": ("prompt", "completion", *_OPTIONS),
    "alpaca": ("instruction", "input", "output", "history", *_OPTIONS),
    "text": ("text",),
    "tokens": ("input_ids", "labels", "loss_mask"),
    "preference": ("prompt", "chosen", "rejected", *_OPTIONS),
    "prompts": ("messages", "conversations", "prompt", *_OPTIONS),
    "rows": (),
    "synthetic": (),
}

_ROWS: tuple[DataFormat, ...] = tuple(one for one in COLUMNS if one != "synthetic")
_TOKENISED: tuple[DataFormat, ...] = tuple(one for one in _ROWS if one not in ("prompts", "rows"))
# The formats that use a key of ``[data]``, for keys that not every format uses. `COLUMNS` says it of columns.
USED_BY: dict[str, tuple[DataFormat, ...]] = {
    **dict.fromkeys(("path", "name", "split", "limit", "formatter"), _ROWS),
    **dict.fromkeys(("sources", "temperature", "streaming", "workers"), _TOKENISED),
    "overlong": _ROWS,
    "wrap": ("prompt_completion", "preference"),
    "train_on": tuple(one for one in _TOKENISED if one != "text"),
    "prefetch": (*_TOKENISED, "synthetic"),
}
# Values that say what is done anyway in a format that does not use the key.
IDLE: dict[tuple[str, DataFormat], Any] = {("train_on", "text"): "all"}

# Formats of rows with answers that the chat template may render.
RENDERED: tuple[DataFormat, ...] = ("chat", "prompt_completion", "alpaca")
# Formats of rows that the model answers itself: they have no documents before it does.
ASKED: tuple[DataFormat, ...] = ("prompts", "rows")


class ColumnsConfig(Section):
    """Names of the data's columns where they differ from the defaults: `messages = "dialog"`."""

    messages: str | None = None
    """chat, prompts: the list of messages, or its JSON. Default: "messages" or "conversations"."""
    tools: str | None = None
    """chat, prompt_completion, prompts: JSON schemas of the tools, for templates that take them."""
    text: str | None = None
    """text: the text."""
    prompt: str | None = None
    """prompt_completion, preference, prompts: the prompt, a text or a list of messages, or its JSON."""
    completion: str | None = None
    """prompt_completion: the answer to train on, a text or a list of messages."""
    instruction: str | None = None
    """alpaca: the question."""
    input: str | None = None
    """alpaca: the text that the question is about; it may be empty or missing."""
    output: str | None = None
    """alpaca: the answer to train on."""
    input_ids: str | None = None
    """tokens: the token ids."""
    labels: str | None = None
    """tokens: the token ids again (not shifted), with −100 for tokens that are not supervised."""
    loss_mask: str | None = None
    """tokens, chat: 1 for each token, or each message, to learn and 0 for the others. Default: "loss_mask",
    "completion_mask", "assistant_masks" or another name that tools use."""
    chosen: str | None = None
    """preference: the better answer, a text or a list of messages."""
    rejected: str | None = None
    """preference: the worse answer."""
    ignore: list[str] | None = None
    """Columns to pass over, where the format would read them, or refuse rows that have them."""


class DataPathConfig(Section):
    """One set of rows: a named held-out set, or a source of a mix."""

    path: InputPath
    """A JSONL, JSON, parquet, Arrow, CSV or text file, a glob of them, a folder, an fsspec URL or a hub dataset id."""
    name: str | None = None
    """Configuration (subset, config_name) of a hub dataset or of a folder that has several."""
    split: str = "train"
    """Split of a hub dataset or of a folder with splits, or a slice of it; files are all "train": `"train[:95%]"`."""
    limit: PositiveInt | None = None
    """Read only this many rows, the first ones. Default for a source: `data.limit`; for held-out data: all."""
    format: Literal["chat", "prompt_completion", "alpaca", "text", "tokens"] | None = None
    """Format of these rows. Default: `data.format`."""
    columns: ColumnsConfig | None = None
    """Names of these rows' columns. Default: `data.columns`."""
    formatter: FunctionPath | None = None
    """A function that makes these rows. Default: `data.formatter`."""

    @property
    def configuration(self) -> str | None:
        """The configuration of the set that `path` names."""
        return self.name


class SourceConfig(DataPathConfig):
    """One source of a mix. Give all sources a weight, all sources epochs, or neither."""

    name: str | None = None
    """Name in the metrics. Default: the path's last part; where two have the same, with their places in the mix."""
    config_name: str | None = None
    """Configuration (subset) of a hub dataset or of a folder that has several, as `data.name`."""
    weight: PositiveFloat | None = None
    """Share of the mix's tokens, relative to the other weights. Default: the source's number of tokens."""
    epochs: PositiveFloat | None = None
    """Passes over this source in one pass over the mix; a fraction continues where the last pass stopped."""

    @property
    def configuration(self) -> str | None:
        return self.config_name


def _refuse_unused(schema: dict[str, Any], owner: type[BaseModel]) -> None:
    """Say in the JSON schema which keys "synthetic" does not use: editors mark them.

    Of other formats it is not said: a source of another format may use the key.
    """
    form = owner.model_fields["format"]
    if "synthetic" not in get_args(form.annotation):
        return
    defaults = {name: field.default for name, field in owner.model_fields.items() if name in USED_BY}
    unused = {name: value for name, value in defaults.items() if "synthetic" not in USED_BY[name]}
    condition: dict[str, Any] = {"properties": {"format": {"const": "synthetic"}}}
    if form.default != "synthetic":
        condition["required"] = ["format"]
    schema["if"] = condition
    schema["then"] = {
        "properties": {name: False if value is None else {"const": value} for name, value in unused.items()}
    }


class DataConfig(Section):
    """What the model is trained on."""

    model_config = ConfigDict(json_schema_extra=_refuse_unused)

    path: InputPath | None = None
    """A JSONL, JSON, parquet, Arrow, CSV or text file, a glob of them, a folder, an fsspec URL or a hub dataset id."""
    name: str | None = None
    """Configuration (subset, config_name) of a hub dataset or of a folder that has several: `"main"`."""
    split: str = "train"
    """Split of a hub dataset or of a folder with splits, or a slice of it; files are all "train": `"train[:95%]"`."""
    limit: PositiveInt | None = None
    """Read only this many rows, the first ones, of the data or of each source of a mix."""
    sources: list[SourceConfig] = []
    """A weighted mix of several data sets, instead of `path`. Each pack holds documents of one of them."""
    temperature: PositiveFloat = 1.0
    """The shares of a mix are weight^(1 / temperature): 1 keeps the weights, larger values make them more equal."""
    format: DataFormat = "chat"
    """What a row of the data contains."""
    columns: ColumnsConfig = ColumnsConfig()
    """Names of the data's columns where they differ from the defaults."""
    formatter: FunctionPath | None = None
    """`path.py:function` or `module:function`, called with each row, a dict of columns; what it returns is read as
    the row: a list as `messages`, a text as `text`, a dict as the columns of `format` (docs/data.md)."""
    wrap: Literal["none", "chat"] = "none"
    """"chat" puts prompts and completions that are plain texts into the tokenizer's chat template, as a user's message
    and the assistant's. "none" joins them unchanged."""
    train_on: Literal["assistant", "all", "last"] = "assistant"
    """Supervised tokens of a conversation: the assistant's with its end-of-turn tokens, those of its last message, or
    all. With prompts and completions: the completion, or all."""
    seq_len: Annotated[int, Field(ge=2, lt=2**31)] = 2048
    """Tokens in a sequence of the batch: a pack, or one padded document."""
    pack: bool = True
    """Put several documents into one pack. They do not attend to each other, and positions restart at 0 in each."""
    overlong: Overlong = "truncate"
    """A row longer than seq_len: truncate (counted; a cut answer keeps its end-of-turn token as the last one), drop
    (counted), split into pieces, or stop with an error."""
    shuffle: bool = True
    """Shuffle the documents every epoch, from `run.seed`. Streams are read in order."""
    streaming: bool = False
    """Read the data in order while training, instead of tokenising all of it first: for data that does not fit on the
    disk twice, or does not end. Needs `train.steps`. Every rank reads the whole stream."""
    workers: NonNegativeInt | Literal["auto"] = "auto"
    """Processes that tokenise; 0 tokenises in this process. "auto": one per core, up to 16, fewer for little data; 0
    for a stream."""
    prefetch: NonNegativeInt = 2
    """Global batches made in the background, ahead of the step."""

    def source_names(self) -> list[str]:
        """The name of each source in the metrics."""
        short = [part.name or Path(part.path).name.partition(".")[0] for part in self.sources]
        names = []
        for at, (part, name) in enumerate(zip(self.sources, short, strict=True)):
            if not name:
                name = str(at)
            elif not part.name and short.count(name) > 1:
                name = f"{name}-{at}"
            names.append(name)
        return names

    def column(self, name: str) -> str:
        """The data's name for our column ``name``."""
        return getattr(self.columns, name, None) or name

    @property
    def configuration(self) -> str | None:
        """The configuration of the set that `path` names."""
        return self.name


class ChatDataConfig(DataConfig):
    """What the model is trained on: conversations."""

    format: Literal["chat", "prompt_completion", "alpaca", "text", "tokens", "preference"] = "chat"
    """"chat": rows with `messages` (or ShareGPT's `conversations`), and `tools` where the template takes them;
    "prompt_completion": rows with `prompt` and `completion`; "alpaca": rows with `instruction`, `input` and `output`,
    put into the chat template; "text": rows with `text`, every token supervised; "tokens": rows with `input_ids` and
    optionally `labels`; "preference": rows with `chosen` and `rejected`, only for recipe "dpo"."""


class PreferenceDataConfig(DataConfig):
    """What the model is trained on: pairs of answers (docs/preferences.md)."""

    format: Literal["preference"] = "preference"
    """Rows with `chosen` and `rejected`, and `prompt` unless both begin with it. The two answers are neighbouring
    documents of one pack."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """Two answers, with their prompts, that are longer than seq_len together: truncate the one longer than half of it
    (counted; a cut answer gets no end-of-turn token), drop both (counted), or stop with an error."""
    train_on: Literal["assistant", "last"] = "assistant"
    """Tokens of an answer that are compared: the assistant's with its end-of-turn tokens, or those of its last
    message."""

    @property
    def needs_log_probs(self) -> bool:
        return True


class TextDataConfig(DataConfig):
    """What the model is trained on: plain text or synthetic tokens."""

    format: Literal["text", "tokens", "synthetic"] = "text"
    """"text": rows with `text`, every token supervised; "tokens": rows with `input_ids`; "synthetic": random tokens,
    no `path` needed."""
    overlong: Overlong = "split"
    """A row longer than seq_len: split into pieces, truncate (counted; the end-of-text token stays the last one), drop
    (counted), or stop with an error."""
