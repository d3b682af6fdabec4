"""Converting a distributed checkpoint to Hugging Face files: memory and time, beside copying and torch's own way.

Memory is private (anonymous) memory above what the process had at the start of each conversion, see
`fsdp2kit.bench.load`. Time is of the conversion alone, imports aside, with everything it wrote synced to the disk, and
nothing of an earlier one left to be written; the median of several rounds, in which the ways take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fsdp2kit import distributed
from fsdp2kit.bench.figures import provenance, provenance_lines
from fsdp2kit.bench.load import llama_config, write_random_model
from fsdp2kit.bench.memory import PrivateMemory
from fsdp2kit.checkpoint.convert import dcp_to_hf
from fsdp2kit.checkpoint.files import CHUNK_BYTES, sync, sync_tree
from fsdp2kit.checkpoint.from_hf import hf_to_dcp

OVERHEAD_BYTES = 500_000_000


@dataclass(frozen=True)
class Options:
    """Which checkpoints are converted, into files of which size."""

    params: Sequence[float] = (0.5e9, 1.5e9)
    """Parameters of random Llamas, roughly, stored in float32 without an optimizer."""
    shard_bytes: int = 10**9
    repeats: int = 3
    """Conversions of each kind."""
    folder: Path | None = None
    """Where to write; default: the system's temporary folder. Needs three times the largest checkpoint."""


def bench_convert(options: Options) -> dict[str, Any]:
    """Convert each checkpoint in every way, on one process."""
    world = distributed.start()
    source = provenance(world)
    sizes = []
    for params in options.params:
        with tempfile.TemporaryDirectory(prefix="fsdp2kit-bench-", dir=options.folder) as name:
            sizes.append(_one_size(params, Path(name), options=options))
    return {
        "benchmark": "convert",
        "options": {
            "params": list(options.params),
            "shard_bytes": options.shard_bytes,
            "repeats": options.repeats,
        },
        "sizes": sizes,
        "within_bound": all(
            size["ways"]["fsdp2kit"]["peak_bytes"] <= options.shard_bytes + OVERHEAD_BYTES
            and size["ways"]["fsdp2kit"]["seconds"] <= 2 * size["ways"]["copy"]["seconds"]
            for size in sizes
        ),
        "provenance": source,
    }


def convert_lines(result: dict[str, Any]) -> list[str]:
    """`bench_convert`'s result for the console."""
    lines = []
    for size in result["sizes"]:
        lines.append(f"convert: {size['parameters'] / 1e6:,.0f} M parameters, {size['bytes'] / 1e9:.2f} GB of float32")
        for name, way in size["ways"].items():
            spread = f"{min(way['all_seconds']):.2f} – {max(way['all_seconds']):.2f}"
            lines.append(f"  {name:<20} {way['seconds']:6.2f} s ({spread}), peak {way['peak_bytes'] / 2**20:,.0f} MiB")
    bound = (result["options"]["shard_bytes"] + OVERHEAD_BYTES) / 2**20
    kept = "kept" if result["within_bound"] else "EXCEEDED"
    return [
        *lines,
        f"  allowed: one file and 500 MB ({bound:,.0f} MiB), and twice the copy's time: {kept}",
        *provenance_lines(result["provenance"]),
    ]


def _one_size(params: float, folder: Path, *, options: Options) -> dict[str, Any]:
    config = llama_config(params)
    write_random_model(folder / "hf", config=config, files=4, dtype=torch.float32)
    checkpoint = folder / "dcp"
    hf_to_dcp(folder / "hf", checkpoint)
    shutil.rmtree(folder / "hf")
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    ways: dict[str, Callable[[Path], object]] = {
        "copy": lambda out: _copy(checkpoint, out),
        "fsdp2kit": lambda out: dcp_to_hf(checkpoint, out, dtype="float32", max_shard_bytes=options.shard_bytes),
        "dcp_to_torch_save": lambda out: _torch_save(checkpoint, out),
    }
    if importlib.util.find_spec("accelerate"):
        ways["merge_fsdp_weights"] = lambda out: _merge(checkpoint, out)
    _copy(checkpoint, folder / "warm")  # so that each finds the files in the cache as the next does
    shutil.rmtree(folder / "warm")
    rounds = [{name: _measure(way, folder / name) for name, way in ways.items()} for _ in range(options.repeats)]
    measured = {name: _summary([each[name] for each in rounds]) for name in ways}
    return {"parameters": stored // 4, "bytes": stored, "ways": measured}


def _measure(way: Callable[[Path], object], out: Path) -> tuple[float, int]:
    """Seconds, and bytes of memory at the peak."""
    os.sync()
    with PrivateMemory() as memory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.perf_counter()
        way(out)
        seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds, memory.peak


def _summary(measured: list[tuple[float, int]]) -> dict[str, Any]:
    seconds = [each for each, _ in measured]
    peak = max(peak for _, peak in measured)
    return {"seconds": statistics.median(seconds), "all_seconds": seconds, "peak_bytes": peak}


def _copy(checkpoint: Path, out: Path) -> None:
    out.mkdir()
    for path in checkpoint.glob("*.distcp"):
        with path.open("rb") as source, (out / path.name).open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
        sync(out / path.name)


def _torch_save(checkpoint: Path, out: Path) -> None:
    out.mkdir()
    dcp_to_torch_save(checkpoint, out / "all.pt")
    sync_tree(out)


def _merge(checkpoint: Path, out: Path) -> None:
    from accelerate.utils import merge_fsdp_weights  # pyright: ignore[reportMissingImports]

    out.mkdir()
    merge_fsdp_weights(str(checkpoint), str(out))
    sync_tree(out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py convert``."""
    parser.add_argument("--params", type=float, nargs="+", default=[0.5, 1.5], help="in 10^9 parameters (0.5 1.5)")
    parser.add_argument("--shard-gb", type=float, default=1.0, help="largest file, in 10^9 bytes (1)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (the temporary folder)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    params = [size * 1e9 for size in options.params]
    result = bench_convert(Options(params, shard_bytes=int(options.shard_gb * 1e9), folder=options.folder))
    return result, convert_lines(result)
