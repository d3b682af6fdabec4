"""What the model is trained on → ``[data]``, and the recipe that fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import Field, as_bool, as_text

_CHAT_NAME = re.compile(r"chat|sft|messages|conversation|dialog|sharegpt|oasst|assistant", re.IGNORECASE)
# Formats of ours, by how theirs begin: chat_template.argilla, chatml, conversational, completion:body.
_FORMATS = {
    **dict.fromkeys(("chat", "messages", "conversation", "sharegpt"), "chat"),
    **dict.fromkeys(("completion", "pretrain", "text"), "text"),
    "alpaca": "prompt_completion",
    "synthetic": "synthetic",
}
_COLUMNS = {"messages": "chat", "text": "text", "prompt": "prompt_completion", "completion": "prompt_completion"}
_PLACEHOLDER = "your-org/your-chats"
RANDOM = "the tokens are random"


def set_data(draft: Draft) -> None:
    """Rows and their format; `sft` for conversations and answers, `pretrain` for text, else `fsdp1_baseline`."""
    builder = draft.take("torchtune builder", "a function of torchtune's: data.path names rows")
    named = draft.take("data.path", RANDOM) or builder
    how, split = draft.take("data.format"), draft.take("data.split", RANDOM)
    columns = {name: field for name in _COLUMNS if (field := draft.take(f"{name} column", RANDOM))}
    if (text := columns.get("text")) and text.word in ("messages", "conversations"):
        columns["messages"] = columns.pop("text")
    path = _path_of(named) if named else None
    form, why = _format(path, how, columns)
    draft.recipe = ({"text": "pretrain", "synthetic": "fsdp1_baseline"}.get(form, "sft"), why)
    draft.set("data.format", form, why)
    draft.note(how, "" if why.startswith("was") else why)
    if named is None or path is None or form == "synthetic":
        return
    draft.was("data.path", draft.relative(path), named)
    if path == _PLACEHOLDER:
        draft.warnings.append(f"{named}: no one file or hub id; set data.path")
        draft.needs.append("data.path=CHATS.jsonl")
    if form == "prompt_completion":
        why = "Alpaca's column; its third one, input, is not read, and no template is applied"
        for name, column in (("prompt", "instruction"), ("completion", "output")):
            draft.set(f"data.columns.{name}", column, why)
        if how is not None and "alpaca" not in as_text(how).lower() and not columns:
            draft.warnings.append(f"{how}: not known here; set data.format and data.columns")
    elif form == "text" and how is not None and ":" in as_text(how):
        draft.was("data.columns.text", as_text(how).rpartition(":")[2], how)
    for name, field in columns.items():
        if _COLUMNS[name] == form:
            draft.was(f"data.columns.{name}", as_text(field), field)
    draft.was("data.split", as_text(split) if split else None, split)


def _path_of(field: Field) -> str:
    """The file or hub id that a field names; llama-recipes and torchtune name functions, axolotl may have a list."""
    value = field.value[0] if isinstance(field.value, list) and len(field.value) == 1 else field.value
    if not isinstance(value, str) or re.fullmatch(r"\w+_dataset", value) or field.name == "dataset._component_":
        return _PLACEHOLDER
    return value


def _format(path: str | None, how: Field | None, columns: dict[str, Field]) -> tuple[str, str]:
    """Our format of the rows, and why."""
    said = as_text(how).lower() if how else ""
    form = next((form for start, form in _FORMATS.items() if said.startswith(start)), "prompt_completion")
    if path is None or form == "synthetic":
        return "synthetic", "no data are named: random tokens"
    if said:
        return form, f"was {how}"
    for name, field in columns.items():
        return _COLUMNS[name], f"was {field}"
    if "alpaca" in path.lower():
        return "prompt_completion", "instructions and answers"
    if row := _first_row(Path(path)):
        is_chat = not {"messages", "conversations"}.isdisjoint(row)
        return ("chat", "its rows have messages") if is_chat else ("text", "its rows have no messages")
    if path == _PLACEHOLDER:
        return "chat", "yours to name"
    return "chat" if _CHAT_NAME.search(path) else "text", "by its name"


def _first_row(path: Path) -> dict[str, Any]:
    """The first row of a JSON Lines file, or nothing."""
    try:
        with path.open(encoding="utf-8") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):  # a hub id, a folder, or a file of another format
        return {}
    return row if isinstance(row, dict) else {}


def set_train_on(draft: Draft) -> None:
    """axolotl's ``train_on_inputs``, torchtune's ``train_on_input``, TRL's ``assistant_only_loss``."""
    whole = draft.take("data.train_on", "every token of a text is learnt")
    answers = draft.take("answers only", f"{whole.path} decides" if whole else "every token of a text is learnt")
    field = whole or answers
    if field is not None and draft.recipe[0] == "sft":
        draft.was("data.train_on", "all" if as_bool(field) == (field is whole) else "assistant", field)
    elif draft.recipe[0] == "sft":
        draft.fill("data.train_on")
