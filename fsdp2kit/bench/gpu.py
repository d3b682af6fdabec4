"""Step time, tokens/s, MFU and peak memory on one device, on random models of two well-known shapes.

No weights, no tokenizer and no network: the shapes are written here, the tokens are drawn, in documents of mixed
lengths packed into rows. FLOPs are the model's (recomputation under activation checkpointing does not count).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from fsdp2kit import distributed
from fsdp2kit.bench.figures import provenance, provenance_lines
from fsdp2kit.bench.trainer import Trainer, build_trainer
from fsdp2kit.config import TrainingConfig
from fsdp2kit.data.batch import Batch
from fsdp2kit.data.formats import IGNORED
from fsdp2kit.distributed import World
from fsdp2kit.errors import UserError
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.train.flops import device_peak_flops
from fsdp2kit.train.memory import peak_memory_bytes

Shape = dict[str, Any]

# The published configs of HuggingFaceTB/SmolLM2-135M and meta-llama/Llama-3.2-1B.
SHAPES: dict[str, Shape] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
    },
}
_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much is run of each variant."""

    seq_len: int = 2048
    """Tokens a row."""
    rows: int = 4
    """Rows a step, in one forward pass."""
    steps: int = 20
    """Optimizer steps of a variant."""
    warmup: int = 5
    """Of these, how many do not count."""


DRY_RUN = Workload(seq_len=64, rows=2, steps=2, warmup=1)


@dataclass(frozen=True)
class SyntheticBatches:
    """Random tokens in documents of random lengths, packed into rows without padding; a loader for one rank."""

    vocab_size: int
    workload: Workload
    steps_per_epoch: int = 1_000_000

    def batch(self, index: int, /) -> list[Batch]:
        """Global batch ``index``, a function of it alone: one micro-batch."""
        generator = np.random.default_rng(index)
        shape = self.workload.rows, self.workload.seq_len
        ids = generator.integers(0, self.vocab_size, size=shape)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        pairs = 0
        for row in range(shape[0]):
            start = 0
            while start < shape[1]:
                length = min(int(generator.integers(shape[1] // 16, shape[1] // 2)), shape[1] - start)
                stop = start + length
                positions[row, start:stop] = np.arange(length)
                labels[row, start : stop - 1] = ids[row, start + 1 : stop]
                pairs, start = pairs + length**2, stop
        return [
            Batch(
                torch.from_numpy(ids),
                torch.from_numpy(labels),
                torch.from_numpy(positions),
                supervised_tokens=int((labels != IGNORED).sum()),
                input_tokens=ids.size,
                attention_pairs=pairs,
            )
        ]


def bench_gpu(*, dry_run: bool = False, attention: str = "auto", max_minutes: float = 6.5) -> dict[str, Any]:
    """Measure every shape with activation checkpointing off and on, in bfloat16, in this one process.

    Args:
        dry_run: tiny shapes and two steps, which any device can run.
        attention: as `model.attention`.
        max_minutes: no variant is started later than this, in minutes; those left out are named.

    Raises:
        UserError: without a CUDA device, unless it is a dry run.
    """
    if distributed.world_size_from_environment()[0] != 1:
        raise UserError("bench gpu", "runs on one device, in one process", "start it with python, not torchrun")
    if not torch.cuda.is_available() and not dry_run:
        raise UserError("bench gpu", "finds no CUDA device", "try it here with --device cpu --dry-run")
    world = distributed.start()
    source = provenance(world)
    started = time.monotonic()
    variants, left_out = [], []
    for name, shape in SHAPES.items():
        for mode in ("none", "full"):
            if time.monotonic() - started > 60 * max_minutes:
                left_out.append(f"{name}, activation checkpointing {mode}")
                continue
            workload = DRY_RUN if dry_run else Workload()
            variants.append(
                _variant(
                    f"tiny {name}" if dry_run else name,
                    _config(shape | (_TINY if dry_run else {}), mode, workload, attention=attention),
                    workload=workload,
                    world=world,
                )
            )
    peak = device_peak_flops(world.device)
    return {
        "benchmark": "gpu",
        "dry_run": dry_run,
        "attention": attention,
        "peak_tflops": None if peak is None else peak / 1e12,
        "variants": variants,
        "left_out": left_out,
        "provenance": source,
    }


def _config(shape: Shape, mode: str, workload: Workload, *, attention: str) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "recipe": "bench",
            "model": {"config": shape, "weights": "random", "attention": attention},
            "activation_checkpointing": {"mode": mode},
            "data": {"seq_len": workload.seq_len},
            "train": {
                "steps": workload.steps,
                "global_batch_size": workload.rows,
                "micro_batch_size": workload.rows,
            },
            "lr_schedule": {"name": "constant"},
        }
    )


def _variant(name: str, config: TrainingConfig, *, workload: Workload, world: World) -> dict[str, Any]:
    result = {
        "model": name,
        "activation_checkpointing": config.activation_checkpointing.mode,
        "dtype": config.fsdp.param_dtype,
        "workload": asdict(workload),
    }
    on_cuda = world.device.type == "cuda"
    _free(on_cuda)
    try:
        trainer = build_trainer(
            config,
            world=world,
            mesh=build_mesh(config.mesh, config.fsdp, world=world),
            batches=SyntheticBatches(config.model.config["vocab_size"], workload),
            metrics_path=None,
        )
        result |= _measure(trainer, workload, synchronize=torch.cuda.synchronize if on_cuda else lambda: None)
    except torch.cuda.OutOfMemoryError:
        return {**result, "error": "out of memory"}
    # A CPU process's peak is that of all variants before it as well.
    return {**result, "peak_memory_gib": peak_memory_bytes(world.device) / 2**30 if on_cuda else None}


def _measure(trainer: Trainer, workload: Workload, *, synchronize: Callable[[], None]) -> dict[str, Any]:
    model: PreTrainedModel = trainer.model
    first = trainer.run(workload.warmup)[0]
    synchronize()
    started = time.perf_counter()
    records = trainer.run(workload.steps - workload.warmup)
    synchronize()
    seconds = (time.perf_counter() - started) / len(records)
    tokens = sum(record["input_tokens"] for record in records) / len(records)
    # The records' FLOP/s are averages over a step each; weighted by its seconds they add up to FLOPs.
    work = sum(record["tflops_per_device"] * record["step_seconds"] for record in records) / len(records)
    peak = device_peak_flops(next(model.parameters()).device)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_seconds": seconds,
        "step_seconds_range": [pick(record["step_seconds"] for record in records) for pick in (min, max)],
        "tokens_per_second": tokens / seconds,
        "tflops": work / seconds,
        "mfu": None if peak is None else work * 1e12 / seconds / peak,
        "loss_first": first["loss"],
        "loss_last": records[-1]["loss"],
    }


def _free(on_cuda: bool) -> None:
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def gpu_lines(result: dict[str, Any]) -> list[str]:
    """`bench_gpu`'s result as a Markdown table with its provenance under it."""
    lines = [
        "| model | AC | tokens a step | step (s) | tokens/s | TFLOP/s | MFU | peak memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for variant in result["variants"]:
        workload = variant["workload"]
        start = f"| {variant['model']} | {variant['activation_checkpointing']} | "
        start += f"{workload['rows']} × {workload['seq_len']} | "
        if "error" in variant:
            lines.append(f"{start}{variant['error']} | | | | |")
            continue
        mfu = "unknown" if variant["mfu"] is None else f"{variant['mfu']:.1%}"
        memory = "not measured" if variant["peak_memory_gib"] is None else f"{variant['peak_memory_gib']:.2f} GiB"
        lines.append(
            f"{start}{variant['step_seconds']:.4f} | {variant['tokens_per_second']:,.0f} | {variant['tflops']:,.1f} | "
            f"{mfu} | {memory} |"
        )
    notes = [f"left out for time: {what}" for what in result["left_out"]]
    if result["dry_run"]:
        notes.append("a dry run on tiny shapes: these are no figures of the models' speed")
    source = provenance_lines(result["provenance"])
    return [*lines, "", *notes, f"attention: {result['attention']}; bfloat16 compute, float32 shards", *source]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py gpu``."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, 2 steps: does it run at all?")
    parser.add_argument("--attention", default="auto", help="as model.attention (auto)")
    parser.add_argument(
        "--max-minutes", type=float, default=6.5, help="start no further variant after this long (6.5)"
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_gpu(dry_run=options.dry_run, attention=options.attention, max_minutes=options.max_minutes)
    return result, gpu_lines(result)
