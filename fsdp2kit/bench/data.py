"""Rows of conversations to packed rows of tokens: ours against `datasets.map` with TRL's packing, in turns.

Both start with an empty cache, tokenise with the same template, and pack by best fit. Ours finds the assistant's spans
and verifies them; TRL's side does what its trainer does: masks by ``{% generation %}`` markers, or none without these.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import datasets

from fsdp2kit.bench.harness import Task, run_sides, task_rows
from fsdp2kit.config.schema import ChatDataConfig, ModelConfig
from fsdp2kit.data.documents import build_documents
from fsdp2kit.data.loader import Share, build_loader
from fsdp2kit.data.template import mark_answers
from fsdp2kit.distributed import World
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer


def bench_data(
    world: World, *, model: str, data: str, chat_template: str | None = None, seq_len: int = 2048, rounds: int = 7
) -> dict[str, Any]:
    """Tokenising and packing a file, ours and TRL's in turns: seconds, tokens/s, how full the rows are.

    Args:
        model: directory of the tokenizer.
        data: conversations, JSONL with `messages`.
        chat_template: a Jinja file instead of the tokenizer's own.
        seq_len: tokens a row.
        rounds: timed runs of each side, after one that does not count.

    Raises:
        UserError: trl is not installed.
    """
    try:
        from trl.data_utils import pack_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("trl", "is not installed", "pip install trl, in an environment of its own") from None
    section = ModelConfig(tokenizer=model, chat_template=chat_template)
    tokenizer: Any = build_tokenizer(section, local_files_only=True)
    masks, found = mark_answers(str(tokenizer.chat_template)) is not None, {}
    datasets.disable_progress_bars()

    def ours() -> None:
        documents = build_documents(ChatDataConfig(path=data, seq_len=seq_len, workers=0), tokenizer=tokenizer)
        loader = build_loader([documents], share=Share(seq_len, 1), pack=True, shuffle=True, seed=0)
        found["fsdp2kit"] = int(documents.lengths.sum()), loader.packs_per_epoch

    def tokenise(example: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(
            example["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=masks
        )
        return {name: encoded[name] for name in ("input_ids", "assistant_masks") if name in encoded}

    def trl() -> None:
        cache = str(datasets.config.HF_DATASETS_CACHE)
        rows: Any = datasets.load_dataset("json", data_files=data, split="train", cache_dir=cache)
        rows = rows.map(tokenise, remove_columns=rows.column_names)
        packed = pack_dataset(rows, seq_len, "bfd", {"load_from_cache_file": False})
        found["trl"] = sum(len(ids) for ids in packed["input_ids"]), len(packed)

    @contextmanager
    def empty_cache() -> Iterator[None]:
        patch = mock.patch.object
        with tempfile.TemporaryDirectory() as folder, patch(datasets.config, "HF_DATASETS_CACHE", Path(folder)):
            yield

    sides = {"fsdp2kit": Task(ours, empty_cache), "trl": Task(trl, empty_cache)}
    rows = task_rows(run_sides(sides, rounds=rounds, warmup=1, world=world))
    for row in rows:
        tokens, packs = found[row["name"]]
        row |= {"tokens": tokens, "tokens_per_second": tokens / row["seconds"]["median"], "packed_rows": packs}
        row["packing_efficiency"] = tokens / (packs * seq_len)
    return {"rows": rows, "notes": [f"the template is {'with' if masks else 'without'} generation markers"]}
