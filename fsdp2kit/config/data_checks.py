"""Checks across the fields of ``[data]`` and ``[eval]``."""

from __future__ import annotations

from collections import Counter

from fsdp2kit.config.data_schema import DataConfig
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError


def check_data(config: TrainingConfig) -> None:
    """Check what ``[data]`` and ``[eval]`` ask for against each other and ``[train]``.

    Raises:
        UserError: at the first contradiction.
    """
    data = config.data
    if data.format == "preference":
        raise UserError(
            "data.format",
            f'"preference" has two answers a row, and recipe = {config.recipe!r} learns one',
            'to learn the better answers set data.format = "chat" and data.columns.messages = "chosen" '
            '(or "prompt_completion" and data.columns.completion = "chosen")',
        )
    _check_sources(data)
    if data.streaming:
        _check_streaming(config)
    _check_evaluation(config)


def _check_sources(data: DataConfig) -> None:
    parts = data.sources
    if not parts:
        return
    if data.path is not None:
        raise UserError("data.sources", "given beside data.path", "make data.path one of the sources")
    if data.format == "synthetic":
        raise UserError("data.sources", 'given with data.format = "synthetic"', "leave one of them out")
    with_weight, with_epochs = (sum(one is not None for one in values) for values in _weights_and_epochs(data))
    if with_epochs and (with_weight or with_epochs < len(parts)):
        raise UserError(
            "data.sources",
            f"{with_epochs} of {len(parts)} have epochs and {with_weight} a weight",
            "give all of them epochs, or none",
        )
    if 0 < with_weight < len(parts):
        raise UserError(
            "data.sources", f"{with_weight} of {len(parts)} have a weight", "give all of them one, or none"
        )
    names = Counter(part.name for part in parts if part.name is not None)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError("data.sources", f"two are named {twice[0]!r}", "give each a name of its own")


def _weights_and_epochs(data: DataConfig) -> tuple[list[float | None], list[float | None]]:
    return [part.weight for part in data.sources], [part.epochs for part in data.sources]


def _check_streaming(config: TrainingConfig) -> None:
    data = config.data
    if config.train.steps is None:
        raise UserError("data.streaming", "with train.epochs: a stream's length is not known", "give train.steps")
    if data.format == "synthetic":
        raise UserError("data.streaming", 'with data.format = "synthetic", which is not read', "leave it out")
    if data.path is None and not data.sources:
        raise UserError("data.path", "is required by data.streaming", "name a file, folder, URL or hub id")
    if any(part.epochs is not None for part in data.sources):
        raise UserError("data.sources", "epochs with data.streaming: lengths are not known", "give weights")
    evaluation = config.eval
    if (evaluation.every or not config.train.steps) and not evaluation.sets and evaluation.path is None:
        raise UserError("eval", "would be a split of a stream, read whole", "give eval.path or eval.sets")


def _check_evaluation(config: TrainingConfig) -> None:
    evaluation, data = config.eval, config.data
    evaluates = evaluation.every > 0 or config.train.steps == 0
    held_out = [(part.path, part.split) for part in evaluation.sets.values()]
    if evaluation.path is not None or evaluation.split != data.split:
        held_out.append((evaluation.path or data.path or "", evaluation.split))
    trained_on = {(part.path, part.split) for part in data.sources} | {(data.path, data.split)}
    if evaluates and (not held_out or any(one in trained_on for one in held_out)):
        raise UserError(
            "eval",
            "evaluation would run on the training data itself",
            "give eval.path, eval.sets, or an eval.split other than data.split",
        )
    if data.sources and evaluates and evaluation.path is None and not evaluation.sets:
        raise UserError("eval.split", "of which of data.sources?", "give eval.path or eval.sets")
    for name in ("patience", "keep_best", "prompts"):
        if getattr(evaluation, name) and not evaluation.every:
            raise UserError(f"eval.{name}", "without evaluations", "set eval.every")
