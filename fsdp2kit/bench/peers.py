"""fsdp2kit beside what users would pick instead: the same model and conversations, in pairs.

Ours and each of the others run in turns, in processes that this one starts, for all of them together would want the
memory of a large machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp2kit import distributed
from fsdp2kit.bench.handwritten import build_handwritten
from fsdp2kit.bench.harness import Command, option, provenance
from fsdp2kit.bench.ours import read_data
from fsdp2kit.bench.sides import PAIR_BARS, LoopSide, OurSide, Side, pair_row, run_sides
from fsdp2kit.config import TrainingConfig, load_config
from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import ChatDataConfig
from fsdp2kit.distributed import World, end_process
from fsdp2kit.errors import RunFailure, UserError

PAIRS = {
    "handwritten": ("fsdp2kit", "handwritten"),
    "trl": ("fsdp2kit", "trl"),
    "trl_without_ac": ("fsdp2kit", "trl_without_ac"),
    "trl_padded": ("fsdp2kit", "trl_padded"),
    "hf_trainer_padded": ("fsdp2kit", "hf_trainer_padded"),
    "hf_trainer_longest": ("fsdp2kit", "hf_trainer_longest"),
    "equal_padding": ("fsdp2kit_padded", "hf_trainer_padded"),
}
"""Comparisons: a side of ours, and the other."""
SAME_BATCHES = {"handwritten", "equal_padding"}
"""Comparisons whose sides see the same batches, so that their losses must agree."""
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all sides train on, and how long."""

    model: str = option(..., "a Hugging Face directory", metavar="DIR")
    data: str = option(..., "conversations (format chat)", metavar="FILE")
    peers: tuple[str, ...] = option(tuple(PAIRS), "whom to compare with (all)", nargs="+", choices=PAIRS)
    nproc: int = option(2, "ranks")
    rounds: int = option(60, "rounds that count, a step of each side")
    warmup: int = option(3, "steps of each side before those")
    seq_len: int = option(512, "tokens a row")
    global_batch: int = option(2, "rows a step, over all ranks")
    micro_batch: int = option(1, "rows a forward pass")
    conversations: int = option(3, "a rank, where they are padded to the longest")
    dtype: str = option("bfloat16", "of compute (bfloat16)", choices=("bfloat16", "float32"))
    cp: int = option(1, "context-parallel ranks on fsdp2kit's side; all others are data-parallel")
    set: tuple[str, ...] = option((), "overrides of fsdp2kit's config", nargs="+", metavar="KEY=VALUE")


class Conversations(TrainingConfig):
    """fsdp2kit's config of a comparison."""

    data: ChatDataConfig = ChatDataConfig()


def missing_packages(name: str) -> list[str]:
    """The packages that this side needs beside ours and that are not installed."""
    needs = ("accelerate", "trl") if name.startswith("trl") else ("accelerate",) if name.startswith("hf") else ()
    return [package for package in needs if importlib.util.find_spec(package) is None]


def bench_peers(options: Options) -> Iterator[dict[str, Any]]:
    """Run the comparisons; gives the result so far after each.

    Raises:
        UserError: none of the others is installed.
        SystemExit: a process of a comparison failed, and said why.
    """
    left_out = {name: missing for name in options.peers if (missing := missing_packages(PAIRS[name][1]))}
    if len(left_out) == len(options.peers):
        missing = sorted({package for packages in left_out.values() for package in packages})
        todo = f"pip install {' '.join(missing)}"
        raise UserError("--peers", f"none of these can run without {', '.join(missing)}", todo)
    result: dict[str, Any] = {
        "benchmark": "peers",
        "options": asdict(options),
        "rows": [],
        "pairs": {},
        "notes": [f"left out: {name} needs {', '.join(packages)}" for name, packages in left_out.items()],
        "checks": {"losses_agree": True},
        "bars": PAIR_BARS,
    }
    for name in (name for name in options.peers if name not in left_out):
        ours, other = PAIRS[name]
        found = _in_processes([ours, other], options)
        sides = found["sides"]
        tolerance = _LOSS_TOLERANCE[options.dtype] if name in SAME_BATCHES else None
        row = pair_row(name, sides[ours], sides[other], tolerance=tolerance)
        result["rows"].append(row)
        result["pairs"][name] = sides
        result["notes"] += [
            line for side in sides if (line := f"{side} ran {sides[side]['ran']}") not in result["notes"]
        ]
        result["checks"]["losses_agree"] &= row["losses_agree"] is not False
        result.setdefault("provenance", found["provenance"])
        yield result


def contest(names: list[str], options: Options) -> dict[str, Any]:
    """Train on each of these sides, in turns. Every rank calls this.

    Returns:
        ``sides``: what `run_sides` found of each; ``provenance``.

    Raises:
        UserError: the model or the data cannot be read, or the sizes do not fit the ranks.
    """
    world = distributed.start()
    source = provenance(world)
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: build_side(name, options, world=world, folder=Path(folder)) for name in names}
        found = run_sides(sides, rounds=options.rounds, warmup=options.warmup, world=world)
    return {"sides": found, "provenance": source}


def build_side(name: str, options: Options, *, world: World, folder: Path) -> Side:
    """One side, with its data read. Every rank calls this.

    Args:
        folder: for its records.

    Raises:
        UserError: the model or the data cannot be read, or the sizes do not fit.
    """
    with distributed.agreement():
        # The others are given documents.
        config = build_config(options, pack=name in ("fsdp2kit", "handwritten"), world=world)
    if name.startswith("fsdp2kit"):
        return OurSide(config, world=world, metrics_path=folder / f"{name}.jsonl")
    loader, tokenizer = read_data(config, dp_rank=world.rank, dp_size=world.size)
    if name == "handwritten":
        build = partial(
            build_handwritten,
            options.model,
            param_dtype=getattr(torch, options.dtype),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            max_grad_norm=config.train.max_grad_norm,
            device=world.device,
        )
        return LoopSide(build, loader)
    from fsdp2kit.bench.hf_trainer import HFSide  # which imports accelerate

    return HFSide(name, config, loader, tokenizer=tokenizer, conversations=options.conversations, world=world)


def build_config(options: Options, *, pack: bool, world: World) -> Conversations:
    """What a user would write into a TOML.

    Raises:
        UserError: sizes that do not fit each other or the ranks.
    """
    values = {
        "recipe": "bench",
        "run": {"resume": "never"},
        "model": {"path": options.model},
        "mesh": {"cp": options.cp},
        "fsdp": {"param_dtype": options.dtype},
        "data": {"path": options.data, "seq_len": options.seq_len, "pack": pack},
        "train": {
            "steps": options.warmup + options.rounds,
            "global_batch_size": options.global_batch,
            "micro_batch_size": options.micro_batch,
        },
        "lr_schedule": {"name": "constant"},
        "wandb": {"mode": "disabled"},
    }
    config = load_config(Conversations, values, source=Path.cwd() / "bench.toml", overrides=options.set)
    check_config(config, world_size=world.size, local_world_size=world.local_size)
    if options.global_batch % (world.size * options.micro_batch):
        raise UserError(
            "--global-batch",
            f"{options.global_batch} is not a multiple of {world.size} ranks × --micro-batch {options.micro_batch}, "
            "which data-parallel loops need",
            f"use a multiple of {world.size * options.micro_batch}",
        )
    if config.data.streaming:
        raise UserError("--set", "data.streaming cannot be read by several loops", "leave it out")
    return config


def _in_processes(names: list[str], options: Options) -> dict[str, Any]:
    """`contest` in as many processes as ``options`` asks for, which this one starts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "contest.json"
        file.write_text(json.dumps({"names": names, "options": asdict(options)}), encoding="utf-8")
        _start([sys.executable, "-m", "fsdp2kit.bench.peers", str(file)], nproc=options.nproc)
        result = json.loads(file.read_text(encoding="utf-8"))
    result["provenance"]["command"] = shlex.join(["python", *sys.argv])
    return result


def _start(command: list[str], *, nproc: int) -> None:
    """Run a command as ``nproc`` ranks of one job on this machine; where one fails, the others are ended.

    torchrun would do, but puts a page of its own around a user's mistake.

    Raises:
        SystemExit: with the exit code of one that failed, which has said why.
        RunFailure: a rank was killed.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    ranks = [
        subprocess.Popen(command, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(nproc)
    ]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.1)
        failed = [rank.returncode for rank in ranks if rank.poll()]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()
            rank.wait()
    if failed and failed[0] < 0:
        raise RunFailure(f"a rank was ended by signal {-failed[0]} (memory?) in: {' '.join(command)}")
    if failed:
        raise SystemExit(failed[0])


def main(file: Path) -> int:
    """One of the processes that `_in_processes` starts: the order is read, and replaced by its result."""
    order = json.loads(file.read_text(encoding="utf-8"))
    try:
        result = contest(order["names"], Options(**order["options"]))
    except UserError as problem:
        distributed.leave(problem)
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(result), encoding="utf-8")
    distributed.stop()
    return 0


COMMANDS = {"peers": Command(Options, bench_peers)}

if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
