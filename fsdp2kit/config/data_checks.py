"""Checks of ``[data]`` and ``[eval]`` against each other and ``[train]``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from fsdp2kit.config.data_formats import COLUMNS, IDLE, USED_BY, DataFormat
from fsdp2kit.config.schema import DataConfig, PreferenceDataConfig, TrainingConfig
from fsdp2kit.errors import UserError

_Rows = tuple[str | None, str | None, Any]  # a set's path, its configuration and its split


def check_data(config: TrainingConfig) -> None:
    """Raise a `UserError` at the first contradiction of ``[data]`` and ``[eval]`` with each other or ``[train]``."""
    data = config.data
    if data.format == "preference" and not isinstance(data, PreferenceDataConfig):
        todo = (
            'to learn from both set recipe = "dpo"; to learn the better answers set data.format = "chat" and '
            'data.columns.messages = "chosen" (or "prompt_completion" and data.columns.completion = "chosen")'
        )
        what = f'"preference" has two answers a row, and recipe = {config.recipe!r} learns one'
        raise UserError("data.format", what, todo)
    _check_used(config)
    _check_columns(config)
    if data.format == "preference" and any(part.format for part in data.sources):
        raise UserError("data.sources", "have formats of their own beside pairs of answers", "give pairs alone")
    data.check_sources()
    if data.streaming:
        _check_streaming(config)
    _check_evaluation(config)


def _check_used(config: TrainingConfig) -> None:
    """Refuse keys with another value than their default that no format in use reads (`USED_BY`)."""
    data = config.data
    evaluation = config.eval
    parts = {f"data.sources.{at}": part for at, part in enumerate(data.sources)}
    parts |= {f"eval.sets.{name}": part for name, part in evaluation.sets.items()}
    formats: list[DataFormat] = [data.format, *(part.format or data.format for part in parts.values())]
    # A mix has no rows of `data.format` if all of its sources have formats of their own.
    read: list[tuple[str, Any, list[Any]]] = [("data", data, formats), ("eval", evaluation, [data.format])]
    for key, part in parts.items():
        read.append((key, part, [part.format or data.format]))
    for key, section, read_as in read:
        for name in section.changed():
            users = USED_BY.get(name)
            value = getattr(section, name)
            if users is None or (key == "eval" and name == "split"):  # synthetic tokens have an evaluation, too
                continue
            if not any(one in users or IDLE.get((name, one)) == value for one in read_as):
                raise _unused(f"{key}.{name}", value, read_as[0], users, type(data))


def _unused(
    key: str, value: Any, form: DataFormat, users: Sequence[DataFormat], schema: type[DataConfig]
) -> UserError:
    """The error of a key that rows of this format do not use."""
    offered = get_args(schema.model_fields["format"].annotation)
    is_one = not issubclass(schema, PreferenceDataConfig)  # "preference" is accepted there only to be explained
    fitting = [one for one in users if one in offered and not (is_one and one == "preference")][:2]
    given = f"{len(value)} entries" if isinstance(value, list) else json.dumps(value, ensure_ascii=False)
    reads = "which is not read: its tokens are random" if form == "synthetic" else f"which does not use {key}"
    choice = " or ".join(f'"{one}"' for one in fitting)
    todo = f"leave it out, or set data.format = {choice}" if fitting else "leave it out"
    return UserError(key, f"{given} with data.format = {form!r}, {reads}", todo)


def _check_columns(config: TrainingConfig) -> None:
    """Refuse a named column that no format in use reads, and both columns of prompts at once."""
    data = config.data
    parts = (*config.data.sources, *config.eval.sets.values())
    shared: dict[DataFormat, None] = dict.fromkeys(
        [data.format, *(part.format or data.format for part in parts if part.columns is None)]
    )
    own = [(part.columns, {part.format or data.format: None}) for part in parts if part.columns is not None]
    for columns, formats in [(data.columns, shared), *own]:
        if "prompts" in formats and columns.prompt is not None and columns.messages is not None:
            what = f"prompt {columns.prompt!r} and messages {columns.messages!r}, and a row asks one of them"
            raise UserError("data.columns", what, "name one")
        read = {name for one in formats for name in COLUMNS[one]}
        for name, called in columns.model_dump(exclude_none=True, exclude={"ignore"}).items():
            if name not in read:
                what = f"{called!r} with data.format = {next(iter(formats))!r}, which reads no {name}"
                fitting = next(one for one, names in COLUMNS.items() if name in names)
                raise UserError(f"data.columns.{name}", what, f'leave it out, or set data.format = "{fitting}"')


def _check_streaming(config: TrainingConfig) -> None:
    data = config.data
    if config.train.steps is None:
        raise UserError("data.streaming", "with train.epochs: a stream's length is not known", "give train.steps")
    if data.path is None and not data.sources:
        raise UserError("data.path", "is required by data.streaming", "name a file, folder, URL or hub id")
    if data.format == "preference":
        raise UserError("data.streaming", "does not keep the two answers of a preference together", "leave it out")
    for key, part in [("data", data), *((f"data.sources.{at}", part) for at, part in enumerate(data.sources))]:
        if "[" in part.split:
            what = f"{part.split!r} with data.streaming, which does not know the length of a split"
            raise UserError(f"{key}.split", what, f"set {key}.limit to read the first rows, or data.streaming = false")
    if any(part.epochs is not None for part in data.sources):
        raise UserError("data.sources", "epochs with data.streaming: lengths are not known", "give weights")
    evaluation = config.eval
    split = config.eval.split
    if isinstance(split, int):
        raise UserError("eval.split", f"{split} rows of a stream of unknown length", "give a share, like 0.01")
    if isinstance(split, float) and config.evaluates and evaluation.steps is None:
        what = f"{split} of a stream, which has no end: the search for held-out rows would not stop"
        raise UserError("eval.split", what, "set eval.steps: the search stops when it has filled as many batches")
    if isinstance(split, str) and config.evaluates and not evaluation.sets and evaluation.path is None:
        todo = "give eval.path or eval.sets, or hold a share out: eval.split = 0.01"
        raise UserError("eval", "would read a split of a stream whole", todo)


def _check_evaluation(config: TrainingConfig) -> None:
    evaluation = config.eval
    data = config.data
    if not isinstance(evaluation.split, str):  # rows are held out of the training data
        what = f"{evaluation.split} of the training data is held out"
        if evaluation.path is not None:
            raise UserError(
                "eval.path", f"is given, and eval.split = {what}", "leave one of them out, or use eval.sets"
            )
        if evaluation.name is not None:
            raise UserError("eval.name", f"{evaluation.name!r}, and eval.split = {what}", "leave one of them out")
        if data.format == "synthetic":
            raise UserError("eval.split", f"{what}, which is generated", 'name a split: eval.split = "validation"')
    held_out: list[_Rows] = [(part.path, part.configuration, part.split) for part in evaluation.sets.values()]
    if evaluation.path is not None or evaluation.name is not None or evaluation.split != data.split:
        name = evaluation.name if evaluation.path else evaluation.name or data.name
        held_out.append((evaluation.path or data.path or "", name, evaluation.split))
    trained_on: list[_Rows] = [(part.path, part.configuration, part.split) for part in data.sources]
    trained_on = trained_on or [(data.path, data.name, data.split)]
    trained_on = [] if config.train.steps == 0 else trained_on
    if config.evaluates and (not held_out or any(_overlap(one, other) for one in held_out for other in trained_on)):
        todo = "give eval.path or eval.sets, or an eval.split other than data.split: 0.02 holds out that share of it"
        raise UserError("eval", "evaluation would run on the training data itself", todo)
    is_split = isinstance(evaluation.split, str) and evaluation.path is None and not evaluation.sets
    if data.sources and config.evaluates and is_split:
        todo = "give eval.path or eval.sets, or hold a share of each out: eval.split = 0.02"
        raise UserError("eval.split", "does not say which of data.sources it splits", todo)
    for name in ("patience", "keep_best", "prompts"):
        if getattr(evaluation, name) and not evaluation.every:
            raise UserError(f"eval.{name}", "without evaluations", "set eval.every")
    if config.checkpoint.export == "best" and not evaluation.keeps_best:
        raise UserError("checkpoint.export", "'best', but no best checkpoint is kept", "set eval.keep_best = true")


def _overlap(one: _Rows, other: _Rows) -> bool:
    """Whether two sets are the same rows, or one is a slice of the other. Two slices may be disjoint."""
    if one[:2] != other[:2] or not isinstance(one[2], str):
        return False
    names = {split.partition("[")[0] for split in (one[2], other[2])}
    return one[2] == other[2] or (len(names) == 1 and names & {one[2], other[2]} != set())
