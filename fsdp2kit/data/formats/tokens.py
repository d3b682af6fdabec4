"""Rows of the format "tokens": ``input_ids``, what is learnt of them, and the documents that a row packs together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp2kit.data.columns import RowColumns
from fsdp2kit.data.names import CUMULATIVE, LENGTHS, NUMBERS, POSITIONS
from fsdp2kit.errors import UserError
from fsdp2kit.model.loss_head import IGNORE

_BORDERS = (*POSITIONS, *LENGTHS, *CUMULATIVE, *NUMBERS, "attention_mask")


class LabelledTokens(NamedTuple):
    """A document that is tokens already."""

    ids: list[int]
    supervised: list[bool]
    """Whether each token is supervised."""


def read_labelled_tokens(row: RowColumns) -> list[LabelledTokens]:
    """The documents of a row's ``input_ids``, each with what is supervised of it.

    A row is one document, unless ``position_ids``, lengths, or numbers of documents say that it packs several. Its
    ``labels`` or a mask say what is learnt: labels are those of transformers' collators, not shifted.
    """
    row["input_ids"]  # required
    ids = _token_ids(row.from_json(row.called("input_ids")), row.where)
    borders = {name: row.from_json(name) for name in _BORDERS if name in row.all}
    starts = _starts(borders, len(ids), row.where)
    said = _said(row, ids)
    learnt = [True] * len(ids)
    if row.section.train_on == "all":
        _check_all_are_learnt(said, starts, row.where)
    else:
        _check_agreement(said, starts, row.where)
        learnt = next(iter(said.values()), learnt)
    documents = itertools.pairwise([*starts, len(ids)])
    return [LabelledTokens(ids[start:stop], learnt[start:stop]) for start, stop in documents]


def _token_ids(value: Any, where: str) -> list[int]:
    ids = _integers(value, "input_ids", where)
    if wrong := [token for token in ids if not 0 <= token < 2**31]:
        raise UserError(where, f"input_ids holds {wrong[0]}", "token ids are not negative, and fit into 32 bits")
    return ids


def _said(row: RowColumns, ids: Sequence[int]) -> dict[str, list[bool]]:
    """Whether each token is learnt: what the row's labels and each of its masks say, by the data's names."""
    # Where only one of them is named, it alone is meant.
    reads_labels = row.is_named("labels") or not row.is_named("loss_mask")
    reads_masks = row.is_named("loss_mask") or not row.is_named("labels")
    said: dict[str, list[bool]] = {}
    if reads_labels and row.given("labels") is not None:
        name = row.called("labels")
        said[name] = _read_labels(row, name, ids)
    if reads_masks:
        said |= row.masks(len(ids), "input_ids")
    return said


def _check_all_are_learnt(said: Mapping[str, list[bool]], starts: Sequence[int], where: str) -> None:
    """Refuse labels and masks that leave a token out. A document's first token is never a target, so it may."""
    for name, learnt in said.items():
        left_out = {at for at, is_learnt in enumerate(learnt) if not is_learnt}
        if left_out - set(starts):
            what = f'{name} leaves tokens out, and data.train_on = "all" learns every token'
            todo = f'set data.train_on = "assistant", which follows it, or data.columns.ignore = ["{name}"]'
            raise UserError(where, what, todo)


def _check_agreement(said: Mapping[str, list[bool]], starts: Sequence[int], where: str) -> None:
    """Refuse labels and masks that differ at a token. A document's first token is never a target, so it may differ."""
    (first, learnt), *others = said.items() or [("", [])]
    for name, other in others:
        wrong = [at for at, pair in enumerate(zip(learnt, other, strict=True)) if pair[0] != pair[1]]
        if differ := set(wrong) - set(starts):
            at = min(differ)
            yes, no = (first, name) if learnt[at] else (name, first)
            what = f"{yes} says that token {at} is learnt, and {no} that it is not"
            todo = f'let them agree, or say which is meant: data.columns.labels = "labels" or .loss_mask = "{name}"'
            raise UserError(where, what, todo)


def _read_labels(row: RowColumns, name: str, ids: Sequence[int]) -> list[bool]:
    """Whether each token is learnt by the labels in the column ``name``."""
    try:
        return _labelled(row.from_json(name), ids, row.where)
    except UserError as error:
        if row.section.train_on != "all":
            raise
        # Every token is learnt, so the row needs no labels.
        todo = f'{error.todo}, or set data.columns.ignore = ["{name}"]'
        raise UserError(error.where, error.what, todo) from None


def _labelled(labels: Any, ids: Sequence[int], where: str) -> list[bool]:
    labels = _integers(labels, "labels", where)
    if len(labels) != len(ids):
        raise UserError(where, f"{len(labels)} labels for {len(ids)} input_ids", "give one label a token")
    for at, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, IGNORE):
            what = f"labels[{at}] is {label}, neither input_ids[{at}] = {token} nor {IGNORE}"
            raise UserError(where, what, "labels are not shifted here: the loss shifts them")
    return [label != IGNORE for label in labels]


def _starts(written: Mapping[str, Any], count: int, where: str) -> list[int]:
    """The index of each document's first token, ascending; all columns that say it must agree.

    Args:
        written: the row's columns of `_BORDERS`, by their names.
    """
    found: dict[str, list[int]] = {}
    readers = [(POSITIONS, _from_positions), (LENGTHS, _from_lengths), (CUMULATIVE, _from_cumulative)]
    readers.append((NUMBERS, _from_numbers))
    for names, starts_from in readers:
        for name in names:
            value = written.get(name)
            if isinstance(value, list):  # one number is something else
                found[name] = starts_from(value, count, name, where)
    mask = written.get("attention_mask")
    if mask is not None:
        numbers = _integers(mask, "attention_mask", where, booleans=True)
        if 0 in numbers:
            raise UserError(where, "attention_mask holds zeros: the row is padded", "give rows without padding")
        starts = _from_numbers(numbers, count, "attention_mask", where)
        if len(starts) > 1:  # axolotl numbers the documents of a pack in it
            found["attention_mask"] = starts
    if not found:
        return [0]
    (first, starts), *others = found.items()
    for name, other in others:
        if other != starts:
            at = min(set(other) ^ set(starts))
            one = first if at in starts else name
            what = f"{first} and {name} differ: by {one} alone a document begins at token {at}"
            raise UserError(where, what, f'mend them, or set data.columns.ignore = ["{name}"]')
    return starts


def _from_positions(value: list[Any], count: int, name: str, where: str) -> list[int]:
    """Documents begin where positions restart at 0."""
    if any(isinstance(one, list) for one in value):
        what = f"{name} is a list of lists, as models of images have it, and only text is trained"
        raise UserError(where, what, f"give {name} as a list of integers, or drop it")
    positions = _counted(value, count, name, where)
    for at, (before, here) in enumerate(zip([-1, *positions], positions, strict=False)):
        if here != 0 and (here != before + 1 or at == 0):
            follows = f"begins at {here}" if at == 0 else f"goes from {before} to {here} at token {at}"
            todo = "let positions count from 0 in each document, or drop the column"
            raise UserError(where, f"{name} {follows}", todo)
    return [at for at, here in enumerate(positions) if here == 0] or [0]


def _from_lengths(value: list[Any], count: int, name: str, where: str) -> list[int]:
    lengths = _integers(value, name, where)
    if any(one < 0 for one in lengths) or sum(lengths) != count:
        what = f"{name} holds lengths of {sum(lengths)} tokens in all, and input_ids has {count}"
        raise UserError(where, what, "give the length of each document of the row")
    return _of_ends([0, *itertools.accumulate(lengths)], count)


def _from_cumulative(value: list[Any], count: int, name: str, where: str) -> list[int]:
    ends = _integers(value, name, where)
    if ends[:1] != [0] or ends[-1] != count or ends != sorted(ends):
        what = f"{name} does not ascend from 0 to the row's {count} tokens"
        raise UserError(where, what, "give the first token of each document, and the number of tokens as its end")
    return _of_ends(ends, count)


def _from_numbers(value: list[Any], count: int, name: str, where: str) -> list[int]:
    """Documents begin where the number of the document changes."""
    numbers = _counted(value, count, name, where)
    starts = [at for at, here in enumerate(numbers) if at == 0 or here != numbers[at - 1]]
    of_documents = [numbers[at] for at in starts]
    if len(set(of_documents)) < len(of_documents):
        twice = next(one for one in of_documents if of_documents.count(one) > 1)
        what = f"{name} comes back to document {twice} after another one"
        raise UserError(where, what, "put the tokens of a document together")
    if len(starts) > 1 and of_documents[-1] <= 0 < max(of_documents):
        what = f"{name} ends in {of_documents[-1]} after documents of higher numbers: the row is padded"
        raise UserError(where, what, "give rows without padding")
    return starts or [0]


def _of_ends(ends: Sequence[int], count: int) -> list[int]:
    """The first tokens of documents that are not empty."""
    return sorted({end for end in ends if end < count}) or [0]


def _counted(value: list[Any], count: int, name: str, where: str) -> list[int]:
    numbers = _integers(value, name, where)
    if len(numbers) != count:
        raise UserError(where, f"{name} has {len(numbers)} entries for {count} input_ids", "give one a token")
    return numbers


def _integers(value: Any, name: str, where: str, *, booleans: bool = False) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise UserError(where, f"{name} is of type {type(value).__name__}", f"give {name} as a list of integers")
    kinds = (int, bool) if booleans else (int,)
    if wrong := [item for item in value if type(item) not in kinds]:
        raise UserError(where, f"{name} holds {wrong[0]!r}", f"give {name} as a list of integers")
    return [int(item) for item in value]
