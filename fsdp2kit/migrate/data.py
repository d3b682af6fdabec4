"""Rules for ``[data]``, and for the recipe that fits the data."""

from __future__ import annotations

import re
from pathlib import Path

from fsdp2kit.files.local import load_json, open_regular
from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import TABLE, Field
from fsdp2kit.migrate.values import as_bool, as_text

_CHAT_NAME = re.compile(r"chat|sft|messages|conversation|dialog|sharegpt|oasst|assistant", re.IGNORECASE)
_COLUMNS = {"messages": "chat", "text": "text", "prompt": "prompt_completion", "completion": "prompt_completion"}
_PLACEHOLDER = "your-org/your-chats"


def data(draft: Draft) -> None:
    """Rows and their format, and the recipe that fits: `sft` for answers, `pretrain` for text, else `fsdp1_baseline`.

    ``data.path`` is left to be given where the file names no data.
    """
    builder, named = draft.take("torchtune builder"), draft.take("data.path")
    named, how, split = named or builder, draft.take("data.format"), draft.take("data.split")
    configuration = draft.take("data.name")
    columns = {name: field for name in _COLUMNS if (field := draft.take(f"{name} column"))}
    if (text := columns.get("text")) and text.word in ("messages", "conversations"):
        columns["messages"] = columns.pop("text")
    path = _path_of(named)
    form, why = _format(path, how, columns)
    draft.recipe = ({"text": "pretrain", "synthetic": "fsdp1_baseline"}.get(form, "sft"), why)
    draft.set("data.format", form, why)
    draft.note(how, "" if why.startswith("was") else why)
    if form == "synthetic":
        return
    if path is None:
        draft.needs.append("data.path=FILE")
    else:
        draft.was("data.path", draft.relative(path), named)
    draft.was("data.name", as_text(configuration), configuration)
    if path == _PLACEHOLDER:
        draft.warnings.append(f"{named}: no one file or hub id; set data.path")
        draft.needs.append("data.path=CHATS.jsonl")
    said = as_text(how) or ""
    if form == "prompt_completion":
        why = "Alpaca's column; its third one, input, is not read, and no template is applied"
        draft.set("data.columns.prompt", "instruction", why)
        draft.set("data.columns.completion", "output", why)
        if said and "alpaca" not in said.lower() and not columns:
            draft.warnings.append(f"{how}: not known here; set data.format and data.columns")
    elif form == "text" and ":" in said:
        draft.was("data.columns.text", said.rpartition(":")[2], how)
    for name, field in columns.items():
        draft.was(f"data.columns.{name}", as_text(field) if _COLUMNS[name] == form else None, field)
    draft.was("data.split", as_text(split), split)


def _path_of(field: Field | None) -> str | None:
    """The file or hub id of a field. llama-recipes and torchtune name functions, axolotl may have a list."""
    if field is None:
        return None
    value = field.value[0] if isinstance(field.value, list) and len(field.value) == 1 else field.value
    if not isinstance(value, str) or re.fullmatch(r"\w+_dataset", value) or field.name == "dataset._component_":
        return _PLACEHOLDER
    return value


def _format(path: str | None, how: Field | None, columns: dict[str, Field]) -> tuple[str, str]:
    """Our format of the rows, and why."""
    said = (as_text(how) or "").lower()
    starts = {form: tuple(names.split()) for form, names in TABLE["formats"].items()}
    form = next((form for form, names in starts.items() if said.startswith(names)), "prompt_completion")
    if form == "synthetic":
        return form, f"was {how}"
    if said:
        return form, f"was {how}"
    for name, field in columns.items():
        return _COLUMNS[name], f"was {field}"
    if path is None:
        return "text", "the file names no data: yours to set"
    if "alpaca" in path.lower():
        return "prompt_completion", "instructions and answers"
    try:
        with open_regular(Path(path)) as file:
            row = load_json(file.readline())
    except (OSError, ValueError):  # a hub id, a folder, or a file of another format
        row = None
    if isinstance(row, dict) and row:
        is_chat = not {"messages", "conversations"}.isdisjoint(row)
        return ("chat", "its rows have messages") if is_chat else ("text", "its rows have no messages")
    if path == _PLACEHOLDER:
        return "chat", "yours to name"
    return "chat" if _CHAT_NAME.search(path) else "text", "by its name"


def train_on(draft: Draft) -> None:
    """axolotl's ``train_on_inputs``, torchtune's ``train_on_input``, TRL's ``assistant_only_loss``."""
    whole, answers = draft.take("data.train_on"), draft.take("answers only")
    if whole is not None:
        draft.note(answers, f"{whole.path} decides")
    if draft.recipe[0] == "sft" and (field := whole or answers):
        draft.was("data.train_on", "all" if as_bool(field) == (field is whole) else "assistant", field)
    elif draft.recipe[0] == "sft":
        draft.fill("data.train_on")


def packing(draft: Draft) -> None:
    """``data.pack``: a switch, llama-recipes' strategy, or run_clm's blocks, which are cut from concatenated texts."""
    pack, strategy, seq_len = map(draft.take, ("data.pack", "batching strategy", "data.seq_len"))
    note = "documents in a row do not see each other; train.global_batch_size then counts packs of seq_len tokens"
    if pack is not None:
        draft.was("data.pack", as_bool(pack), pack, note=note if as_bool(pack) else "")
    elif strategy is not None:
        is_packed = strategy.word == "packing"
        draft.was("data.pack", is_packed, strategy, note=note if is_packed else "")
    elif draft.get("data.format") == "synthetic":
        return
    elif seq_len is not None and seq_len.name == "block_size":
        draft.was("data.pack", True, seq_len, note=note)
    else:
        draft.fill("data.pack", True, f"our default, false if your loop pads; {note}")
