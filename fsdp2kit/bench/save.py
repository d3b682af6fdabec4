"""Saving: the seconds for which training waits, asynchronously beside synchronously, and what else a save costs.

Asynchronously, training waits in `save` (for the one before, and while tensors are listed) and once more before the
optimizer's next step, for what of the copy is not yet made. The writer also competes for cores, which on a CPU shows
in the steps that run beside it: reported, and no part of the waiting.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp2kit import distributed
from fsdp2kit.bench.figures import barrier, compare, positive, provenance, provenance_lines, slowest_rank, summary
from fsdp2kit.bench.load import llama_config
from fsdp2kit.checkpoint.manager import CheckpointManager, build_checkpoint_manager
from fsdp2kit.config.schema import CheckpointConfig, FSDPConfig, ModelConfig, TrainingConfig
from fsdp2kit.distributed import World, gather_objects
from fsdp2kit.model.build import build_model
from fsdp2kit.model.weights import initialize
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.progress import Progress


@dataclass(frozen=True)
class Options:
    """What is saved, and how often."""

    params: float
    """Parameters of a random Llama, roughly; AdamW's two moments come on top."""
    pairs: int = 3
    tokens: int = 256
    """Tokens of a rank's batch: how long the forward and backward are that hide the copy."""


class _Trainer:
    """A model, AdamW, and one step apart into what comes before and after the optimizer may change anything."""

    def __init__(self, options: Options, *, world: World) -> None:
        hf_config = llama_config(options.params)
        section = ModelConfig(weights="random", config={"model_type": "llama"})
        config = TrainingConfig(recipe="bench", model=section, fsdp=FSDPConfig(param_dtype="float32"))
        mesh = build_mesh(config.mesh, config.fsdp, world=world)
        self.model: Any = build_model(config.model, hf_config=hf_config)
        parallelize_model(self.model, config, mesh=mesh, device=world.device)
        initialize(self.model, seed=0)
        self.optimizer: Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._tokens = torch.arange(options.tokens, device=world.device)[None] % hf_config.vocab_size

    def backward(self) -> None:
        positions = torch.arange(self._tokens.shape[1], device=self._tokens.device)[None]
        self.model.loss_sum(self._tokens, self._tokens.roll(-1), position_ids=positions).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def bench_save(options: Options) -> dict[str, Any]:
    """Save alternately in both ways, between steps of a random model. Every rank calls this."""
    world = distributed.start()
    source = provenance(world)
    trainer = _Trainer(options, world=world)
    figures: dict[str, list[float]] = {name: [] for name in ("sync", "blocked", "until_written", "quiet", "beside")}
    with _shared_folder(world) as folder:
        managers = {name: _manager(folder / name, is_async=name == "async") for name in ("sync", "async")}
        for number in range(options.pairs + 1):  # the first of each is not counted: buffers and state are made then
            gc.collect()
            step = _step(trainer, world=world)
            seconds = {"quiet": step, "sync": _sync(managers["sync"], trainer, number + 1, world=world)}
            seconds |= _async(managers["async"], trainer, number + 1, world=world)
            if number:
                for name, value in seconds.items():
                    figures[name].append(value)
    figures = {name: slowest_rank(values) for name, values in figures.items()}
    ratio = compare(figures["blocked"], figures["sync"])
    return {
        "benchmark": "save",
        "options": {"params": options.params, "pairs": options.pairs, "tokens": options.tokens},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "time": {name: {**summary(values), "seconds": values} for name, values in figures.items()},
        "blocked_over_sync": ratio,
        "within_bound": ratio["ratio"] <= 0.05,
        "provenance": source,
    }


def save_lines(result: dict[str, Any]) -> list[str]:
    """`bench_save`'s result for the console."""
    time_of = {name: figures["median_seconds"] for name, figures in result["time"].items()}
    ratio = result["blocked_over_sync"]
    return [
        f"save: {result['parameters'] / 1e6:,.0f} M parameters and AdamW in float32",
        f"  synchronous: training waits {time_of['sync']:.2f} s",
        f"  asynchronous: training waits {time_of['blocked']:.3f} s; published {time_of['until_written']:.2f} s after "
        "the save began",
        f"  blocked ÷ synchronous: {ratio['ratio']:.3f} (95 % bootstrap interval {ratio['ratio_low']:.3f} – "
        f"{ratio['ratio_high']:.3f}); allowed: 0.05 ({'kept' if result['within_bound'] else 'EXCEEDED'})",
        f"  a step takes {time_of['quiet']:.2f} s, and {time_of['beside']:.2f} s beside a save",
        *provenance_lines(result["provenance"]),
    ]


def _step(trainer: _Trainer, *, world: World) -> float:
    barrier(world.device)
    started = time.perf_counter()
    trainer.backward()
    trainer.update()
    barrier(world.device)
    return time.perf_counter() - started


def _sync(manager: CheckpointManager, trainer: _Trainer, step: int, *, world: World) -> float:
    barrier(world.device)
    started = time.perf_counter()
    manager.save(trainer.model, trainer.optimizer, Progress(step=step))
    seconds = time.perf_counter() - started
    manager.finish()
    return seconds


def _async(manager: CheckpointManager, trainer: _Trainer, step: int, *, world: World) -> dict[str, float]:
    barrier(world.device)
    started = time.perf_counter()
    manager.save(trainer.model, trainer.optimizer, Progress(step=step))
    blocked = time.perf_counter() - started
    trainer.backward()
    waiting = time.perf_counter()
    manager.wait_until_staged()
    blocked += time.perf_counter() - waiting
    trainer.update()
    beside = time.perf_counter() - started - blocked
    manager.finish()
    return {"blocked": blocked, "until_written": time.perf_counter() - started, "beside": beside}


def _manager(folder: Path, *, is_async: bool) -> CheckpointManager:
    section = CheckpointConfig(keep=1, async_save=is_async, export_hf="never")
    return build_checkpoint_manager(section, run_dir=folder, identity={}, write_assets=lambda _: None)


@contextmanager
def _shared_folder(world: World) -> Iterator[Path]:
    """A temporary folder of the main rank that all ranks of this machine know; gone afterwards."""
    own = tempfile.mkdtemp(prefix="fsdp2kit-bench-") if world.is_main else ""
    folder = gather_objects(own)[0]
    try:
        yield Path(folder)
        barrier(world.device)
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py save``."""
    parser.add_argument("--params", type=float, default=0.5, help="size of the random model, in 10^9 parameters (0.5)")
    parser.add_argument("--pairs", type=positive, default=3, help="saves that count, of each kind (3)")
    parser.add_argument("--tokens", type=positive, default=256, help="tokens of a rank's batch (256)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_save(Options(params=options.params * 1e9, pairs=options.pairs, tokens=options.tokens))
    return result, save_lines(result)
