"""The TOML that `fsdp2kit new` writes: its keys, with a comment where a value was chosen, and its text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdp2kit.starter.rows import DataFacts, choose_length

REWARDS = "fsdp2kit.starter.rewards"
_HELD_OUT_FROM = 200  # rows; of fewer, none are held out
_RESPONSE = 256  # tokens of a response


@dataclass(frozen=True)
class DraftKind:
    """What `new` can write: a recipe, or a variant of one."""

    recipe: str
    purpose: str
    lr: float
    batch: int = 16
    """Packs of a step; of recipe grpo, responses."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_LORA = {"rank": 16, "alpha": 32}
KINDS = {
    "sft": DraftKind("sft", "Supervised fine-tuning of all parameters.", 2e-5),
    "lora": DraftKind("sft", "LoRA: adapters beside the frozen model.", 2e-4, sections={"lora": _LORA}),
    "qlora": DraftKind(
        "sft",
        "QLoRA: adapters beside the frozen model, which is kept in 4 bits.",
        2e-4,
        sections={"lora": {**_LORA, "quantize": "nf4"}},
    ),
    "dpo": DraftKind(
        "dpo", "Preferences: DPO on pairs of answers.", 1e-6, sections={"dpo": {"loss": "dpo", "beta": 0.1}}
    ),
    "distill": DraftKind("distill", "Distillation: the model learns a teacher's distribution.", 2e-5),
    "grpo": DraftKind("grpo", "Reinforcement learning from rewards: GRPO.", 1e-6, batch=64),
    "pretrain": DraftKind("pretrain", "Training on plain text.", 1e-4, batch=32),
    "fsdp1_baseline": DraftKind("fsdp1_baseline", "The baseline that FSDP1 is compared with.", 1e-4),
}


@dataclass(frozen=True)
class DraftKey:
    """A key's value, and why it is that."""

    value: Any
    comment: str = ""
    is_open: bool = False
    """Whether the user has to fill it in: it is written as a comment."""


@dataclass(frozen=True)
class Facts:
    """What is known when a TOML is drafted."""

    kind: str
    """A key of `KINDS`."""
    model: str | None
    """As the TOML says it; None: to be filled in. So are the next two."""
    data: str | None
    teacher: str | None
    run_dir: str
    rows: DataFacts | None = None
    chat_template: str | None = None
    """A ready template, where the tokenizer has none."""
    context: int | None = None
    """Positions that the model was made for."""
    is_here: bool = False
    """Whether the model's config is on this machine."""
    world_size: int = 1


Sections = dict[str, dict[str, DraftKey]]


def draft(facts: Facts) -> Sections:
    """The sections of a first TOML, without what a plan for a device changes."""
    kind = KINDS[facts.kind]
    model = {"path": _given(facts.model, "a Hugging Face directory or hub id")}
    if facts.chat_template:
        model["chat_template"] = DraftKey(facts.chat_template, "the tokenizer has none")
    sections: Sections = {"run": {"dir": DraftKey(facts.run_dir)}, "model": model}
    for name, values in kind.sections.items():
        sections[name] = {key: DraftKey(value) for key, value in values.items()}
    if kind.recipe == "distill":
        sections["distill"] = {"teacher": _given(facts.teacher, "a larger model with the same tokenizer")}
    sections["data"] = data = _data(facts)
    if kind.recipe == "grpo":
        sections |= _rollouts(facts, room=data["seq_len"].value)
    batch = _batch_size(facts, seq_len=data["seq_len"].value)
    sections["train"] = {
        **_duration(facts),
        "global_batch_size": DraftKey(batch, _batch_comment(facts)),
        "micro_batch_size": DraftKey(1, "packs in one forward pass"),
    }
    sections["optimizer"] = {"lr": DraftKey(kind.lr, "the first thing to try others of")}
    sections["lr_schedule"] = {"warmup_ratio": DraftKey(0.03, "of all steps")}
    if facts.rows is not None and (facts.rows.count or 0) >= _HELD_OUT_FROM:
        steps = _steps_per_epoch(facts, data["seq_len"].value, batch)
        every = 10 if steps is None or kind.recipe == "grpo" else max(1, steps // 5)
        share = DraftKey(0.05, "the share of rows that are held out, and not trained on")
        sections["eval"] = {"every": DraftKey(every, "steps"), "split": share}
    return sections


def _given(value: str | None, words: str) -> DraftKey:
    return DraftKey("…", f"fill in: {words}", is_open=True) if value is None else DraftKey(value)


def _data(facts: Facts) -> dict[str, DraftKey]:
    keys = {"path": _given(facts.data, "a file, folder, URL or hub id; `fsdp2kit docs data` has the formats")}
    rows = facts.rows
    recipe = KINDS[facts.kind].recipe
    if rows is not None:
        keys["format"] = DraftKey(rows.guess.format, "as the first rows are")
        if rows.guess.columns:
            keys["columns"] = DraftKey(rows.guess.columns, "ours = the data's")
        if rows.wrap:
            keys["wrap"] = DraftKey("chat", "plain texts go into the model's chat template")
    keys["seq_len"] = _length(facts)
    if recipe == "grpo":
        keys["overlong"] = DraftKey("drop", "prompts that leave no room for a response")
    else:
        keys["pack"] = DraftKey(True, "several rows to a sequence; they do not see each other")
    return keys


def _length(facts: Facts) -> DraftKey:
    recipe = KINDS[facts.kind].recipe
    rows = facts.rows
    more = _RESPONSE if recipe == "grpo" else 0
    if rows is None or rows.lengths is None:
        size = min(2048, facts.context or 2048)
        return DraftKey(size, "not measured: tokens of a sequence, the longest row's or more")
    lengths = rows.lengths
    is_text = rows.guess.format in ("text", "tokens") and recipe != "sft"
    size = choose_length(lengths, context=facts.context, more=more, is_text=is_text)
    shown = f"{int(np.percentile(lengths, 99, method='inverted_cdf')):,}"
    what = {"grpo": "prompts", "dpo": "pairs"}.get(recipe, "rows")
    said = f"99 % of {what} have {shown} tokens or fewer, the longest {int(lengths.max()):,}"
    if facts.context and size == facts.context:
        said += f"; the model's context is {facts.context:,}"
    return DraftKey(size, said)


def _rollouts(facts: Facts, *, room: int) -> Sections:
    has_reference = facts.rows is not None and facts.rows.has_reference
    function = "words_in_common" if has_reference else "is_finished"
    comment = "a first try: words shared with the row's answer" if has_reference else "a first try: it comes to an end"
    return {
        "rollout": {
            "n": DraftKey(8, "responses to each prompt"),
            "max_new_tokens": DraftKey(min(_RESPONSE, room // 2), "tokens of a response"),
        },
        "[reward]": {
            "function": DraftKey(f"{REWARDS}:{function}", f"{comment}; write your own: `fsdp2kit docs grpo`")
        },
    }


def _duration(facts: Facts) -> dict[str, DraftKey]:
    if KINDS[facts.kind].recipe == "grpo":
        return {"steps": DraftKey(100)}
    return {"epochs": DraftKey(1, "passes over the data")}


def _batch_comment(facts: Facts) -> str:
    return "responses of a step" if KINDS[facts.kind].recipe == "grpo" else "packs of a step, over all ranks"


def _batch_size(facts: Facts, *, seq_len: int) -> int:
    """The recipe's usual batch, smaller for little data, as a multiple that all ranks can share."""
    kind = KINDS[facts.kind]
    unit = facts.world_size
    wanted = kind.batch
    if kind.recipe == "grpo":
        unit = math.lcm(unit, 8)
    elif packs := _packs(facts, seq_len):
        wanted = min(wanted, max(1, packs // 10))
    return max(1, math.ceil(wanted / unit)) * unit


def _packs(facts: Facts, seq_len: int) -> int | None:
    """About how many packs the data fill."""
    rows = facts.rows
    if rows is None or rows.lengths is None or rows.count is None:
        return None
    return math.ceil(float(np.minimum(rows.lengths, seq_len).mean()) * rows.count / seq_len)


def _steps_per_epoch(facts: Facts, seq_len: int, batch: int) -> int | None:
    packs = _packs(facts, seq_len)
    return None if packs is None else math.ceil(packs / batch)


def merged(sections: Sections, values: Mapping[str, Any], comment: str) -> Sections:
    """The sections with a plan's values by ``section.key``, which say ``comment``; new sections go before the data."""
    found = {name: dict(keys) for name, keys in sections.items()}
    for dotted, value in values.items():
        section, _, name = dotted.partition(".")
        found.setdefault(section, {})[name] = DraftKey(value, comment)
    last = [
        name for name in ("data", "rollout", "[reward]", "train", "optimizer", "lr_schedule", "eval") if name in found
    ]
    return {name: found[name] for name in (*(name for name in found if name not in last), *last)}


def as_toml(sections: Sections, *, recipe: str, head: list[str]) -> str:
    """The text of the TOML.

    Args:
        recipe: the recipe's name.
        head: the comment's lines at the top, without their ``#``.
    """
    lines = [*(f"#{'' if line.startswith(':') else ' '}{line}" for line in head), "", f"recipe = {_toml(recipe)}"]
    for name, keys in sections.items():
        lines += ["", f"[{name}]"]
        for key, one in keys.items():
            comment = f" # {one.comment}" if one.comment else ""
            lines.append(f"{'# ' if one.is_open else ''}{key} = {_toml(one.value)}{comment}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
