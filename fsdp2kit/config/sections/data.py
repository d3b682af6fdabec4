"""[data]: where rows are, what they contain, and how long they may be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from fsdp2kit.config.data_formats import USED_BY, DataFormat, Overlong
from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.path_contents import Contents, check_contents
from fsdp2kit.config.section import FunctionPath, InputPath, Section
from fsdp2kit.errors import UserError

_ROWS_HERE = "give rows here (JSONL, parquet, …)"
_INSTEAD: dict[Contents, str] = {
    "model": f"set model.path to it, and {_ROWS_HERE}",
    "adapter": _ROWS_HERE,
    "checkpoint": f"set model.weights to it, and {_ROWS_HERE}",
    "run": _ROWS_HERE,
    "weights": f"set model.path to its directory, and {_ROWS_HERE}",
    "gguf": _ROWS_HERE,
}


def check_rows(key: str, path: str | None) -> None:
    """Refuse a path of rows where something else lies; None: the key is not given."""
    check_contents(key, path, _INSTEAD)


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

    def named(self, column: str) -> str | None:
        """What the TOML says that a column is called; None: it says nothing, or there is no key for that column."""
        return getattr(self, column) if column in type(self).model_fields else None


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
    all. With prompts and completions: the completion, or all. Rows of tokens say it by their labels and masks."""
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
        return self.columns.named(name) or name

    @property
    def configuration(self) -> str | None:
        """The configuration of the set that `path` names."""
        return self.name

    def check(self, config: Any, sizes: MeshSizes) -> None:
        super().check(config, sizes)
        check_rows("data.path", self.path)
        for at, part in enumerate(self.sources):
            check_rows(f"data.sources.{at}.path", part.path)

    def check_sources(self) -> None:
        """Refuse sources that contradict each other, or the keys of a single set beside them."""
        parts = self.sources
        if not parts:
            return
        if self.path is not None:
            raise UserError("data.sources", "given beside data.path", "make data.path one of the sources")
        for name, own in (("name", "config_name"), ("split", "split")):
            if name in self.changed():
                what = f"{getattr(self, name)!r} with data.sources, each of which has its own"
                raise UserError(f"data.{name}", what, f"set {own} in the sources that need it")
        with_weight = sum(part.weight is not None for part in parts)
        with_epochs = sum(part.epochs is not None for part in parts)
        if with_epochs and (with_weight or with_epochs < len(parts)):
            what = f"{with_epochs} of {len(parts)} have epochs and {with_weight} a weight"
            raise UserError("data.sources", what, "give all of them epochs, or none")
        if 0 < with_weight < len(parts):
            what = f"{with_weight} of {len(parts)} have a weight"
            raise UserError("data.sources", what, "give all of them one, or none")
        if twice := [name for name, count in Counter(self.source_names()).items() if count > 1]:
            raise UserError("data.sources", f"two are named {twice[0]!r}", "give each a name of its own")


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


class PromptDataConfig(DataConfig):
    """The prompts. Columns that are not read here are handed to the reward functions."""

    format: Literal["prompts", "rows"] = "prompts"
    """Rows with `messages` (a last message of the assistant is dropped) or with a `prompt`: a text (a user's message
    where the tokenizer has a chat template) or a list of messages. "rows", the default with `rollout.environment`:
    whatever columns the environment reads."""
    seq_len: Annotated[int, Field(ge=2)] = 2048
    """Most tokens of a prompt and its response (with `rollout.environment`: of a conversation), and of a row of the
    batch, which holds several of them."""
    overlong: Literal["drop", "error"] = "error"
    """A prompt that leaves no room for `rollout.max_new_tokens`: stop with an error, or drop it (counted)."""
    pack: Literal[True] = True
    """Always: rows hold several rollouts, balanced by tokens."""
    sources: Annotated[list[Any], Field(max_length=0)] = []
    """Not supported: give one file."""
    streaming: Literal[False] = False
    """Not supported: prompts are read whole."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        super().check(config, sizes)
        if config.eval.sets:
            raise UserError("eval.sets", "prompts are held out as one set", "use eval.path, or eval.split = 0.02")
        if config.eval.prompts:
            what = "held-out rewards have answers to their own prompts, in samples.jsonl"
            raise UserError("eval.prompts", what, "leave it out")
