"""Rows of conversations to packed rows of tokens: ours against `datasets.map` with TRL's packing, alternating.

Both read the same JSONL, tokenise every row with the same template, and pack by best fit into rows of the same length;
both start with an empty cache and write one. Ours finds the assistant's spans and verifies them; TRL's side does what
its trainer does, with the masks of ``{% generation %}`` markers, or, with a template that has none, without masks.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp2kit.bench.figures import Cost, compare, positive, provenance, provenance_lines, summary
from fsdp2kit.config.schema import ChatDataConfig, ModelConfig
from fsdp2kit.data.documents import build_documents
from fsdp2kit.data.loader import build_part
from fsdp2kit.data.spans import has_markers
from fsdp2kit.distributed import start
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What `bench_data` compares on."""

    model: str
    """Directory of the tokenizer."""
    data: str
    """A JSONL of conversations."""
    chat_template: str | None = None
    """A Jinja file instead of the tokenizer's own template."""
    seq_len: int = 2048
    repeats: int = 7
    """Timed runs of each side, after one that is not counted."""


def bench_data(options: DataOptions) -> dict[str, Any]:
    """Seconds and tokens/s of tokenising and packing a file, ours and TRL's.

    Raises:
        UserError: trl is not installed.
    """
    source = provenance(start())
    section = ModelConfig(tokenizer=options.model, chat_template=options.chat_template)
    tokenizer = build_tokenizer(section, local_files_only=True)
    sides: dict[str, Callable[[], tuple[int, int, int]]] = {
        "fsdp2kit": lambda: _ours(options, tokenizer),
        "trl": _trl(options, tokenizer),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    found: dict[str, tuple[int, int, int]] = {}
    for turn in range(options.repeats + 1):
        for name in list(sides) if turn % 2 else list(sides)[::-1]:
            took, found[name] = _timed(sides[name])
            if turn:
                costs[name].append(took)
    seconds = {name: [cost.seconds for cost in costs[name]] for name in sides}
    cpu = {name: [cost.cpu_seconds for cost in costs[name]] for name in sides}
    result: dict[str, Any] = {"benchmark": "data", "options": asdict(options), "markers": has_markers(tokenizer)}
    for name, (tokens, rows, kept) in found.items():
        figures = summary(seconds[name])
        result[name] = {
            **figures,
            "tokens": tokens,
            "tokens_per_second": tokens / figures["median_seconds"],
            "rows": rows,
            "packing_efficiency": kept / (rows * options.seq_len),
            "seconds": seconds[name],
            "cpu_seconds": cpu[name],
        }
    result |= compare(seconds["fsdp2kit"], seconds["trl"])
    return {**result, "cpu_time": compare(cpu["fsdp2kit"], cpu["trl"]), "provenance": source}


def data_lines(result: dict[str, Any]) -> list[str]:
    """`bench_data`'s result for the console."""
    lines = [f"tokenise and pack, {'with' if result['markers'] else 'without'} generation markers in the template"]
    for name in ("trl", "fsdp2kit"):
        side = result[name]
        lines.append(
            f"  {name:<9} median {side['median_seconds']:.2f} s, {side['tokens_per_second']:,.0f} tokens/s, "
            f"{side['rows']:,} rows, {side['packing_efficiency']:.1%} full"
        )
    for what, ratio in (("speed", result), ("speed by the process's CPU time", result["cpu_time"])):
        low, high = 1 / ratio["ratio_high"], 1 / ratio["ratio_low"]
        lines.append(f"  {what}, fsdp2kit ÷ trl: {1 / ratio['ratio']:.2f} (95 % interval {low:.2f} – {high:.2f})")
    return [*lines, *provenance_lines(result["provenance"])]


def _timed(work: Callable[[], tuple[int, int, int]]) -> tuple[Cost, tuple[int, int, int]]:
    import datasets

    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", Path(folder)):
            started, cpu_started = time.perf_counter(), time.process_time()
            found = work()
        return Cost(time.perf_counter() - started, time.process_time() - cpu_started), found


def _ours(options: DataOptions, tokenizer: Any) -> tuple[int, int, int]:
    """``(tokens of all rows, packed rows, tokens in them)``."""
    section = ChatDataConfig(seq_len=options.seq_len, workers=0)
    documents = build_documents(section, path=options.data, split="train", tokenizer=tokenizer, seed=0)
    part = build_part(documents, seq_len=options.seq_len, pack=True, shuffle=True, seed=0)
    kept = int(documents.lengths.sum())
    return kept, len(part.plan), kept


def _trl(options: DataOptions, tokenizer: Any) -> Callable[[], tuple[int, int, int]]:
    try:
        from trl.data_utils import pack_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("trl", "is not installed", "pip install trl, in an environment of its own") from None
    import datasets

    masks = has_markers(tokenizer)

    def tokenise(example: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(
            example["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=masks
        )
        return {name: encoded[name] for name in ("input_ids", "assistant_masks") if name in encoded}

    def work() -> tuple[int, int, int]:
        datasets.disable_progress_bars()
        cache = str(datasets.config.HF_DATASETS_CACHE)
        rows = datasets.load_dataset("json", data_files=options.data, split="train", cache_dir=cache)
        rows = rows.map(tokenise, remove_columns=rows.column_names)
        packed = pack_dataset(rows, options.seq_len, "bfd", {"load_from_cache_file": False})
        kept = sum(len(ids) for ids in packed["input_ids"])
        return kept, len(packed), kept

    return work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py data``."""
    parser.add_argument("--model", required=True, metavar="DIR", help="directory of the tokenizer")
    parser.add_argument("--data", required=True, metavar="FILE", help="conversations, JSONL with `messages`")
    parser.add_argument("--chat-template", metavar="FILE", help="instead of the tokenizer's own")
    parser.add_argument("--seq-len", type=positive, default=2048, help="tokens a row (2048)")
    parser.add_argument("--repeats", type=positive, default=7, help="timed runs of each side (7)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_data(
        DataOptions(
            model=options.model,
            data=options.data,
            chat_template=options.chat_template,
            seq_len=options.seq_len,
            repeats=options.repeats,
        )
    )
    return result, data_lines(result)
