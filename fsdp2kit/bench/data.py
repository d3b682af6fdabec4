"""Rows of conversations to packed rows of tokens: ours against `datasets.map` with TRL's packing, in turns.

Both read the same JSONL, tokenise every row with the same template, and pack by best fit into rows of the same length;
both start with an empty cache and write one. Ours finds the assistant's spans and verifies them; TRL's side does what
its trainer does, with the masks of ``{% generation %}`` markers, or, with a template that has none, without masks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from fsdp2kit.bench.harness import Command, Cost, cost_rows, option, provenance, take_turns, timed
from fsdp2kit.config.schema import ChatDataConfig, ModelConfig
from fsdp2kit.data.chat import mark_answers
from fsdp2kit.data.documents import build_documents
from fsdp2kit.data.loader import Share, build_loader
from fsdp2kit.distributed import start
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is tokenised and packed."""

    model: str = option(..., "directory of the tokenizer", metavar="DIR")
    data: str = option(..., "conversations, JSONL with `messages`", metavar="FILE")
    chat_template: str | None = option(None, "a Jinja file instead of the tokenizer's own", metavar="FILE")
    seq_len: int = option(2048, "tokens a row")
    rounds: int = option(7, "timed runs of each side, after one that does not count")


class Packed(NamedTuple):
    """What came out."""

    tokens: int
    rows: int


def bench_data(options: Options) -> dict[str, Any]:
    """Seconds and tokens/s of tokenising and packing a file, ours and TRL's.

    Raises:
        UserError: trl is not installed.
    """
    import datasets

    world = start()
    source = provenance(world)
    section = ModelConfig(tokenizer=options.model, chat_template=options.chat_template)
    tokenizer = build_tokenizer(section, local_files_only=True)
    ways: dict[str, Callable[[], Packed]] = {
        "fsdp2kit": lambda: _ours(options, tokenizer),
        "trl": _trl(options, tokenizer),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    found: dict[str, Packed] = {}

    def step(name: str) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(datasets.config, "HF_DATASETS_CACHE", Path(folder)),
        ):
            cost, found[name] = timed(ways[name], device=world.device)
        costs[name].append(cost)

    take_turns({name: lambda name=name: step(name) for name in ways}, options.rounds + 1)
    rows = cost_rows({name: each[1:] for name, each in costs.items()})
    for row in rows:
        tokens, packs = found[row["name"]]
        row |= {"tokens": tokens, "tokens_per_second": tokens / row["seconds"]["median"], "packed_rows": packs}
        row["packing_efficiency"] = tokens / (packs * options.seq_len)
    return {
        "benchmark": "data",
        "options": asdict(options),
        "rows": rows,
        "notes": [f"the template is {'with' if _has_markers(tokenizer) else 'without'} generation markers"],
        "provenance": source,
    }


def _has_markers(tokenizer: Any) -> bool:
    return mark_answers(str(tokenizer.chat_template)) is not None


def _ours(options: Options, tokenizer: Any) -> Packed:
    section = ChatDataConfig(path=options.data, seq_len=options.seq_len, workers=0)
    documents = build_documents(section, tokenizer=tokenizer)
    loader = build_loader([documents], share=Share(options.seq_len, 1), pack=True, shuffle=True, seed=0)
    return Packed(int(documents.lengths.sum()), loader.rows_per_epoch)


def _trl(options: Options, tokenizer: Any) -> Callable[[], Packed]:
    try:
        from trl.data_utils import pack_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("trl", "is not installed", "pip install trl, in an environment of its own") from None
    import datasets

    masks = _has_markers(tokenizer)

    def tokenise(example: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(
            example["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=masks
        )
        return {name: encoded[name] for name in ("input_ids", "assistant_masks") if name in encoded}

    def work() -> Packed:
        datasets.disable_progress_bars()
        cache = str(datasets.config.HF_DATASETS_CACHE)
        rows = datasets.load_dataset("json", data_files=options.data, split="train", cache_dir=cache)
        rows = rows.map(tokenise, remove_columns=rows.column_names)
        packed = pack_dataset(rows, options.seq_len, "bfd", {"load_from_cache_file": False})
        return Packed(sum(len(ids) for ids in packed["input_ids"]), len(packed))

    return work


COMMANDS = {"data": Command(Options, bench_data)}
