"""What the model is trained on → ``[data]``, and the recipe that fits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import AXOLOTL, Field, as_bool, as_int, find

_CHAT_NAME = re.compile(r"chat|sft|messages|conversation|dialog|sharegpt|oasst|assistant", re.IGNORECASE)
_CHAT_FORMATS = ("chat", "messages", "conversational", "sharegpt", "conversation", "chatml", "chat_template")
_THEN = "train.global_batch_size then counts packs of seq_len tokens, not documents"
_PACKS = f"documents in a row do not see each other; {_THEN}"
_PLACEHOLDER = "your-org/your-chats"
_RANDOM = "the tokens are random"


def set_data(draft: Draft) -> None:
    """Rows and their format; `sft` for conversations and answers, `pretrain` for text, else `fsdp1_baseline`."""
    named = draft.take("data.path", _RANDOM)
    builder = draft.take("torchtune builder", "a function of torchtune's: data.path names rows")
    text = draft.take("column", _RANDOM)
    how = draft.take("data.format")
    split = draft.take("data.split", _RANDOM)
    path = draft.given_data or (_path_of(named) if named is not None else None)
    if path == _PLACEHOLDER or (builder is not None and path is None):
        path = _PLACEHOLDER
        draft.warnings.append(f"{named or builder}: no one file or hub id; set data.path")
        draft.needs.append("data.path=CHATS.jsonl")
    entry = _first_of_list(named)
    form, why, columns = _axolotl_rows(draft, f"{named.path}[0]", entry) if named and entry else ("", "", {})
    if not form:
        form, why = _format(path, how, text)
    if form == "prompt_completion" and not columns:
        columns = dict(_ALPACA)
    draft.recipe = ({"text": "pretrain", "synthetic": "fsdp1_baseline"}.get(form, "sft"), why)
    draft.set("data.format", form, f"was {how}" if how is not None else why)
    if path is None or form == "synthetic":
        return
    why = f"was {named}" if named is not None else "--data"
    draft.set("data.path", draft.relative(path), why)
    if text is not None:
        draft.was(f"data.columns.{'messages' if form == 'chat' else 'text'}", str(text.value), text)
    for key, (value, why) in columns.items():
        draft.set(key, value, why)
    if split is not None:
        draft.was("data.split", str(split.value), split)


def _path_of(field: Field) -> str:
    """The file or hub id that a field names; llama-recipes names functions, axolotl has a list."""
    value = field.value
    if isinstance(value, list) and len(value) == 1:
        value = value[0].get("path") if isinstance(value[0], dict) else value[0]
    if not isinstance(value, str) or re.fullmatch(r"\w+_dataset", value):
        return _PLACEHOLDER
    return value


def _format(path: str | None, how: Field | None, text: Field | None) -> tuple[str, str]:
    """Our format of the rows, and why."""
    said = how.word if how is not None else ""
    if path is None or said == "synthetic":
        return "synthetic", "no data are named: random tokens"
    if said in _CHAT_FORMATS or (text is not None and text.word in ("messages", "conversations")):
        return "chat", f"was {how or text}"
    if said == "alpaca" or (not said and "alpaca" in path.lower()):
        return "prompt_completion", "instructions and answers"
    if said or text is not None:
        return "text", f"was {how or text}"
    if row := _first_row(Path(path)):
        is_chat = not {"messages", "conversations"}.isdisjoint(row)
        return ("chat", "its rows have messages") if is_chat else ("text", "its rows have no messages")
    if path == _PLACEHOLDER:
        return "chat", "yours to name"
    return ("chat", "by its name") if _CHAT_NAME.search(path) else ("text", "by its name")


def _first_row(path: Path) -> dict[str, Any]:
    """The first row of a JSON Lines file, or nothing."""
    if path.suffix not in (".jsonl", ".json") or not path.is_file():
        return {}
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return row if isinstance(row, dict) else {}


Columns = dict[str, tuple[str, str]]
"""Keys of ``[data]``, each with its value and comment."""

_ALPACA: Columns = {
    "data.columns.prompt": ("instruction", "Alpaca's column; its third one, input, is not read"),
    "data.columns.completion": ("output", "Alpaca's column"),
}
_GUESS = "a guess, Alpaca's column: set your own"
_GUESSED: Columns = {
    "data.columns.prompt": ("instruction", f"{_GUESS}; its third one, input, is not read"),
    "data.columns.completion": ("output", _GUESS),
}
# Keys of an entry that are read here, or that say what a ShareGPT row says by itself.
_READ = {
    *("path", "type", "split", "field", "field_messages", "conversation", "chat_template"),
    *("message_field_role", "message_field_content", "ds_type", "roles_to_train", "train_on_eos"),
}
_ANSWERS_ALONE = ([], ["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"])


def _first_of_list(named: Field | None) -> Mapping[str, Any]:
    """The first entry of a list of data sets, if it says of what type its rows are."""
    first = named.value[0] if named is not None and isinstance(named.value, list) and named.value else None
    return first if isinstance(first, Mapping) and first.get("type") is not None else {}


def _axolotl_rows(draft: Draft, where: str, entry: Mapping[str, Any]) -> tuple[str, str, Columns]:
    """The format of a data set's rows, why, and further keys; what has no counterpart is warned of.

    Its ``type`` is a name (``alpaca``, ``chat_template``, ``completion:body``) or a table (``{field_output: a}``).
    """
    kind = entry["type"]
    form, why, keys = "prompt_completion", f"was {where}.type = {kind}", dict(_ALPACA)
    head, _, tail = str(kind).partition(":")
    name = head.lower()
    warnings = draft.warnings
    if isinstance(kind, Mapping):
        told, why = f"was {where}.type", "questions and answers"
        for ours, theirs in (("prompt", "instruction"), ("completion", "output")):
            keys[f"data.columns.{ours}"] = (str(kind.get(f"field_{theirs}") or theirs), told)
        left = sorted(key for key, value in kind.items() if value and key not in ("field_instruction", "field_output"))
        if left:
            warnings.append(f"{where}.type: {', '.join(left)} not translated; the prompt is the column as it is")
    elif name.startswith(("chat", "sharegpt", "messages", "conversation")):  # chat_template.argilla, chatml
        column = entry.get("field_messages")
        form, keys = "chat", {"data.columns.messages": (str(column), f"was {where}.field_messages")} if column else {}
        if (entry.get("roles_to_train") or []) not in _ANSWERS_ALONE:
            warnings.append(f"{where}.roles_to_train = {entry['roles_to_train']}: the assistant's tokens are learnt")
        if entry.get("train_on_eos") not in (None, "turn"):
            warnings.append(f"{where}.train_on_eos = {entry['train_on_eos']}: every end of an answer is learnt")
    elif name in ("completion", "pretrain", "text"):
        column = entry.get("field") or (tail if name == "completion" else "")
        form, keys = "text", {"data.columns.text": (str(column), why)} if column else {}
    else:
        if not name.startswith("alpaca"):
            keys = dict(_GUESSED)
            warnings.append(f"{where}.type = {kind}: not known here; set data.columns, or data.format")
        warnings.append(f"{where}.type = {kind}: the prompt is the column as it is, without a template or input")
    if left := sorted(set(entry) - _READ):
        warnings.append(f"{where}: {', '.join(left)} not translated")
    if entry.get("split"):
        keys["data.split"] = (str(entry["split"]), f"was {where}.split")
    if form != "text" and draft.program is AXOLOTL and not any(one.name == "train_on_inputs" for one in draft.fields):
        keys["data.train_on"] = ("assistant", "not in the file: train_on_inputs is false in axolotl")
    return form, why, keys


def set_train_on(draft: Draft) -> None:
    """axolotl's ``train_on_inputs``, torchtune's ``train_on_input``, TRL's ``assistant_only_loss``."""
    whole = draft.take("data.train_on", "every token of a text is learnt")
    answers = draft.take("answers only", "every token of a text is learnt")
    field = whole or answers
    if field is not None and draft.recipe[0] == "sft":
        is_everything = as_bool(field) == (field is whole)
        draft.was("data.train_on", "all" if is_everything else "assistant", field)
    if field is not None and field is whole:
        draft.note(answers, f"{field.path} decides")


def set_order(draft: Draft) -> None:
    """``data.shuffle`` and ``data.streaming``, where there are rows."""
    for name in ("shuffle", "streaming"):
        field = draft.take_names(f"{name} dataset.{name}", _RANDOM)
        if field is not None and draft.get("data.path"):
            draft.was(f"data.{name}", as_bool(field), field)


def set_rows(draft: Draft) -> None:
    """Length and packing; ``pack`` is always written where there are rows: ours packs by default, most others pad."""
    length = draft.take("data.seq_len")
    if length is not None:
        draft.was("data.seq_len", as_int(length), length)
    draft.fill("data.seq_len", 2048, "not in the file: our default, set your own")
    pack = draft.take("data.pack")
    strategy = draft.take("batching strategy")
    program = draft.program
    if told := pack or strategy:
        is_packed = as_bool(pack) if pack else told.word == "packing"
        draft.was("data.pack", is_packed, told, _PACKS if is_packed else "")
    elif draft.get("data.format") == "synthetic":
        return
    elif length is not None and length.name == "block_size":
        draft.was("data.pack", True, length, f"run_clm's blocks are cut from concatenated texts; {_PACKS}")
    elif program.pads:
        draft.set(
            "data.pack",
            False,
            f"{program.default}: one padded document a row. true wastes no tokens on padding; {_THEN}",
        )
    elif find(draft.fields, "dataset._component_"):
        draft.set("data.pack", False, "not in the file: torchtune's default")
    else:
        draft.set("data.pack", True, f"not in the file: our default, false if your loop pads; {_PACKS}")
