"""Step time, tokens/s, MFU and peak memory on one device, on random models of well-known shapes.

No weights, no tokenizer and no network: the shapes are written here, the tokens are drawn, in documents of mixed
lengths packed into rows. FLOPs are the model's (recomputation does not count).
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from fsdp2kit import distributed
from fsdp2kit.bench.harness import Command, option, provenance, speed, spread
from fsdp2kit.bench.kernels import shares, trace
from fsdp2kit.bench.memory import give_back_memory
from fsdp2kit.bench.ours import read_data
from fsdp2kit.bench.sides import OurSide, Side, Synthetic, run_sides
from fsdp2kit.config import TrainingConfig
from fsdp2kit.distributed import World
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.flops import count_model_flops, device_peak_flops, flops_per_batch


def _llama3(hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, *, tied: bool) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0 if tied else 8.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "max_position_embeddings": 131072,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
    }


# The published configs of HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B.
SHAPES: dict[str, dict[str, Any]] = {
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
    "Llama-3.2-1B": _llama3(2048, 8192, 16, 32, 64, tied=True),
    "Llama-3.2-3B": _llama3(3072, 8192, 28, 24, 128, tied=True),
    "Llama-3.1-8B": _llama3(4096, 14336, 32, 32, 128, tied=False),
}
_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

Overrides = Mapping[str, Mapping[str, Any]]
_COMPILED: Overrides = {"compile": {"enabled": True}}
_FLOAT8: Overrides = {"float8": {"recipe": "rowwise"}}
_SELECTIVE: Overrides = {"activation_checkpointing": {"mode": "selective"}}
_FULL: Overrides = {"activation_checkpointing": {"mode": "full"}}


@dataclass(frozen=True)
class Variant:
    """A model and how it is trained."""

    shape: str
    """Of `SHAPES`."""
    name: str
    """What is special about it; with "Trainer" in front, transformers' Trainer trains it as the one of that name."""
    overrides: tuple[Overrides, ...] = ()
    """Sections of the config, the later over the earlier."""
    rows: int = 1
    """Of a step."""
    seq_len: int = 8192
    steps: int = 15
    warmup: int = 5
    """Of the steps, how many do not count."""
    packages: tuple[str, ...] = ()
    """That it needs beside ours."""

    def __str__(self) -> str:
        return f"{self.shape}, {self.name}"

    @property
    def is_trainers(self) -> bool:
        """Whether transformers' Trainer trains it, which has only some of our settings."""
        return self.name.startswith("Trainer, ")


def _speed(shape: str, rows: int) -> list[Variant]:
    """Eager and compiled, in bfloat16 beside transformers' Trainer, and in float8."""
    trainer = ("accelerate",)
    return [
        Variant(shape, "bfloat16", (), rows),
        Variant(shape, "Trainer, bfloat16", (), rows, packages=trainer),
        Variant(shape, "bfloat16, compiled", (_COMPILED,), rows),
        Variant(shape, "Trainer, bfloat16, compiled", (_COMPILED,), rows, packages=trainer),
        Variant(shape, "float8", (_FLOAT8,), rows, packages=("torchao",)),
        Variant(shape, "float8, compiled", (_FLOAT8, _COMPILED), rows, packages=("torchao",)),
    ]


_8_BIT: Overrides = {"optimizer": {"name": "adamw_8bit"}}
_BFLOAT16: Overrides = {"optimizer": {"name": "adamw_bf16"}, "fsdp": {"storage_dtype": "bfloat16"}}
# Without checkpointing where one H200 (139 GiB) has room: float32 parameters, gradients and moments are 16 bytes each.
GROUPS: dict[str, list[Variant]] = {
    "small": [
        Variant("SmolLM2-135M", "bfloat16", (), 4, 2048, 20),
        Variant("SmolLM2-135M", "Trainer, bfloat16", (), 4, 2048, 20, packages=("accelerate",)),
        Variant("SmolLM2-135M", "bfloat16, full recomputation", (_FULL,), 4, 2048, 20),
    ],
    "1b": [
        *_speed("Llama-3.2-1B", 2),
        Variant("Llama-3.2-1B", "bfloat16, selective recomputation", (_SELECTIVE,), 2),
        Variant("Llama-3.2-1B", "bfloat16, full recomputation", (_FULL,), 2),
    ],
    "3b": _speed("Llama-3.2-3B", 1),
    # 128 GB of state with AdamW in float32, which leaves no room: these are ways to make some.
    "8b": [
        Variant("Llama-3.1-8B", "8-bit moments", (_SELECTIVE, _8_BIT), packages=("torchao",)),
        Variant("Llama-3.1-8B", "bfloat16 parameters and moments", (_SELECTIVE, _BFLOAT16)),
        Variant("Llama-3.1-8B", "moments on the host", (_SELECTIVE, {"fsdp": {"offload": "optimizer"}})),
    ],
}
"""Each fits in a run of nine minutes; what does not is left out, and named."""


@dataclass(frozen=True)
class Options:
    """What is run."""

    groups: tuple[str, ...] = option(
        ("small", "1b"), "models and variants (small 1b)", nargs="+", choices=tuple(GROUPS)
    )
    device: str = option("cuda", "cpu: only with --dry-run", choices=("cuda", "cpu"))
    dry_run: bool = option(False, "tiny shapes, 3 steps: does it run at all?")
    profile: bool = option(False, "do not time, but say where the time goes")
    attention: str | None = option(None, "a transformers attention implementation (the config's default)")
    max_minutes: float = option(7.5, "start no further variant after this long")


def bench_gpu(options: Options) -> dict[str, Any]:
    """Measure the variants of these groups, one after the other in this process, for want of memory for two.

    Raises:
        UserError: without a CUDA device, unless it is a dry run.
    """
    if distributed.ranks_from_environment()[1] != 1:
        raise UserError("bench gpu", "runs on one device, in one process", "start it with python, not torchrun")
    if not torch.cuda.is_available() and not options.dry_run:
        raise UserError("bench gpu", "finds no CUDA device", "try it here with --device cpu --dry-run")
    world = distributed.start()
    source = provenance(world)
    started = time.monotonic()
    rows, left_out = [], {}
    for variant in (variant for group in options.groups for variant in GROUPS[group]):
        if options.profile and variant.is_trainers:
            continue
        reason = obstacle(variant, device=world.device)
        if reason is None and time.monotonic() - started > 60 * options.max_minutes:
            reason = f"{options.max_minutes:g} minutes were over"
        if reason is not None:
            left_out[str(variant)] = reason
            continue
        rows.append(_run(variant, options, world=world))
    notes = [] if options.profile else beside_trainer(rows)
    notes += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    if options.dry_run:
        notes.append("a dry run on tiny shapes: these are no figures of the models' speed")
    return {
        "benchmark": "gpu",
        "options": asdict(options),
        "rows": rows,
        "left_out": left_out,
        "notes": notes,
        "bars": {"tokens/s": ["tokens_per_second"], "peak memory (bytes)": ["allocated_bytes"]},
        "provenance": source,
    }


def _run(variant: Variant, options: Options, *, world: World) -> dict[str, Any]:
    """One variant's figures, or why it came to nothing."""
    config = config_of(variant, attention=options.attention, dry_run=options.dry_run)
    row: dict[str, Any] = {
        "model": f"tiny {variant.shape}" if options.dry_run else variant.shape,
        "variant": variant.name,
        "recomputes": config.activation_checkpointing.mode,
        "rows": f"{config.train.global_batch_size} × {config.data.seq_len}",
    }
    measure = _profile if options.profile else _time
    try:
        return row | measure(variant, config, options, world=world)
    except torch.cuda.OutOfMemoryError:
        return {**row, "error": "out of memory"}
    except UserError as problem:
        return {**row, "error": str(problem)}
    finally:
        give_back_memory()


def _side(variant: Variant, config: TrainingConfig, loader: Any, *, world: World) -> Side:
    if not variant.is_trainers:
        return OurSide(config, world=world, batches=loader)
    from fsdp2kit.bench.hf_trainer import HFSide  # which imports accelerate

    return HFSide("hf_trainer", config, loader, tokenizer=None, conversations=1, world=world)


def _time(variant: Variant, config: TrainingConfig, options: Options, *, world: World) -> dict[str, Any]:
    device, steps = world.device, config.train.steps or 0
    warmup = 1 if options.dry_run else variant.warmup
    loader, _ = read_data(config, dp_rank=0, dp_size=1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    side = _side(variant, config, loader, world=world)
    (found,) = run_sides({"side": side}, rounds=steps - warmup, warmup=warmup, world=world).values()
    counts = count_model_flops(build_model(config.model))  # on meta
    counted = [micro for index in range(warmup, steps) for micro in loader.batch(index)]
    flops = sum(
        flops_per_batch(counts, tokens=micro.input_tokens, attention_pairs=micro.attention_pairs) for micro in counted
    )
    seconds = sum(found["seconds"])
    peak, on_cuda = device_peak_flops(device), device.type == "cuda"
    return {
        "first_step_seconds": found["first_step_seconds"],
        "step": spread(found["seconds"]),
        "tokens_per_second": sum(micro.input_tokens for micro in counted) / seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": None if peak is None else flops / seconds / peak,
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_cuda else None,
        "losses": found["losses"],
    }


def _profile(variant: Variant, config: TrainingConfig, options: Options, *, world: World) -> dict[str, Any]:
    loader, _ = read_data(config, dp_rank=0, dp_size=1)
    side = _side(variant, config, loader, world=world)
    try:
        side.build()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            trace(side, device=world.device, steps=1 if options.dry_run else 3, out=path)
            return shares(path)
    finally:
        side.stop()


def beside_trainer(rows: list[dict[str, Any]]) -> list[str]:
    """Our variants beside those of the same name that transformers' Trainer ran, step by step on the same batches."""
    done = {(row["model"], row["variant"]): row for row in rows if "error" not in row}
    lines = []
    for (model, name), ours in done.items():
        theirs = done.get((model, f"Trainer, {name}"))
        if theirs is None:
            continue
        found = speed(ours["step"]["all"], theirs["step"]["all"])
        line = f"{model}, {name}: {found['ratio']:.2f} ({found['low']:.2f} – {found['high']:.2f}) × as fast as Trainer"
        if ours["allocated_bytes"] is not None:
            line += f", with {ours['allocated_bytes'] / theirs['allocated_bytes']:.2f} of its peak memory"
        lines.append(line)
    return lines


def config_of(variant: Variant, *, attention: str | None, dry_run: bool) -> TrainingConfig:
    """The config of a run of this variant.

    Args:
        attention: None: as the config has it by default.
        dry_run: a tiny model of the same kind, on short rows.

    Raises:
        ValidationError: this version does not know a setting.
    """
    rows, seq_len, steps = (2, 64, 3) if dry_run else (variant.rows, variant.seq_len, variant.steps)
    model: dict[str, Any] = {"config": SHAPES[variant.shape] | (_TINY if dry_run else {}), "weights": "random"}
    values: dict[str, Any] = {
        "recipe": "bench",
        "model": model if attention is None else {**model, "attention": attention},
        "data": {"format": "synthetic", "seq_len": seq_len},
        "train": {"steps": steps, "global_batch_size": rows, "micro_batch_size": rows},
        "lr_schedule": {"name": "constant"},
    }
    for overrides in variant.overrides:
        for section, keys in overrides.items():
            values[section] = {**values.get(section, {}), **keys}
    return Synthetic.model_validate(values)


def obstacle(variant: Variant, *, device: torch.device) -> str | None:
    """Why it cannot be run here; None: it can be tried."""
    try:
        config_of(variant, attention=None, dry_run=False)
    except ValidationError as error:
        unknown = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        return f"this version does not know {unknown} as asked for"
    for package in variant.packages:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    overrides = {section for part in variant.overrides for section in part}
    if device.type == "cpu" and "compile" in overrides:
        return "compiled variants are for a device"
    if device.type == "cuda" and "float8" in overrides and torch.cuda.get_device_capability(device) < (8, 9):
        return "the device has no float8 matmuls"
    return None


COMMANDS = {"gpu": Command(Options, bench_gpu)}
