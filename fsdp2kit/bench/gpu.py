"""Step time, tokens/s, MFU and peak memory on one device, on random models of well-known shapes.

No weights, no tokenizer and no network: the shapes are written in `fsdp2kit.bench.variants`, the tokens are drawn, in
documents of mixed lengths packed into rows. FLOPs are the model's (recomputation does not count).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2kit import distributed
from fsdp2kit.bench.figures import provenance, provenance_lines
from fsdp2kit.bench.kinds import KINDS, shares
from fsdp2kit.bench.runner import Loop, OurLoop, forget_memory, measure, trace
from fsdp2kit.bench.synthetic import SyntheticBatches
from fsdp2kit.bench.variants import GROUPS, Variant, config_of, obstacle, workload_of
from fsdp2kit.config import TrainingConfig
from fsdp2kit.distributed import World
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.train.flops import count_model_flops, device_peak_flops


@dataclass(frozen=True)
class Options:
    """What is run."""

    groups: tuple[str, ...] = ("small", "1b")
    """Of `GROUPS`."""
    dry_run: bool = False
    """Tiny models and three steps, which any device can run."""
    attention: str | None = None
    """A transformers attention implementation; None: the config's default."""
    max_minutes: float = 7.5
    """No variant is started later than this."""
    profile: bool = False
    """Trace the variants instead of timing them, and say where their time goes."""


def bench_gpu(options: Options) -> dict[str, Any]:
    """Measure the variants of these groups, one after the other in this process.

    Raises:
        UserError: without a CUDA device, unless it is a dry run.
    """
    if distributed.world_size_from_environment()[0] != 1:
        raise UserError("bench gpu", "runs on one device, in one process", "start it with python, not torchrun")
    if not torch.cuda.is_available() and not options.dry_run:
        raise UserError("bench gpu", "finds no CUDA device", "try it here with --device cpu --dry-run")
    world = distributed.start()
    source = provenance(world)
    started = time.monotonic()
    measured, left_out = [], []
    for group in options.groups:
        for variant in GROUPS[group]:
            if options.profile and variant.loop != "fsdp2kit":
                continue
            reason = obstacle(variant, device=world.device)
            if reason is None and time.monotonic() - started > 60 * options.max_minutes:
                reason = f"{options.max_minutes:g} minutes were over"
            if reason is not None:
                left_out.append({"variant": str(variant), "reason": reason})
                continue
            measured.append(_run(variant, options, world=world))
    peak = device_peak_flops(world.device)
    return {
        "benchmark": "gpu",
        "options": asdict(options),
        "dry_run": options.dry_run,
        "peak_tflops": None if peak is None else peak / 1e12,
        "variants": measured,
        "left_out": left_out,
        "provenance": source,
    }


def _run(variant: Variant, options: Options, *, world: World) -> dict[str, Any]:
    """One variant's figures, or why it came to nothing."""
    config = config_of(variant, attention=options.attention, dry_run=options.dry_run)
    workload = workload_of(variant, dry_run=options.dry_run)
    model = build_model(config.model)  # on meta
    batches = SyntheticBatches(model.config.vocab_size, workload)
    result: dict[str, Any] = {
        "model": f"tiny {variant.shape}" if options.dry_run else variant.shape,
        "variant": variant.name,
        "activation_checkpointing": config.activation_checkpointing.mode,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "workload": asdict(workload),
    }
    loop = _build_loop(variant, config, model.config, batches, world=world)
    try:
        return result | _measure(loop, model, batches, options, device=world.device)
    except torch.cuda.OutOfMemoryError:
        return {**result, "error": "out of memory"}
    except UserError as problem:
        return {**result, "error": str(problem)}
    finally:
        loop.stop()
        del loop
        forget_memory(world.device)


def _build_loop(
    variant: Variant, config: TrainingConfig, model_config: Any, batches: SyntheticBatches, *, world: World
) -> Loop:
    if variant.loop == "fsdp2kit":
        return OurLoop(config, world=world)
    from fsdp2kit.bench.hf_loop import TrainerLoop

    return TrainerLoop(model_config, config, batches, device=world.device)


def _measure(
    loop: Loop, model: Any, batches: SyntheticBatches, options: Options, *, device: torch.device
) -> dict[str, Any]:
    if not options.profile:
        return measure(loop, batches, count_model_flops(model), device=device)
    loop.build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-00000.json.gz"
        trace(loop, batches, device=device, steps=1 if options.dry_run else 3, out=path)
        return shares(path)


def gpu_lines(result: dict[str, Any]) -> list[str]:
    """`bench_gpu`'s result as a Markdown table with its provenance under it."""
    lines = _profile_table(result) if result["options"]["profile"] else _speed_table(result)
    notes = [] if result["options"]["profile"] else _beside_trainer(result["variants"])
    notes += [f"left out: {one['variant']}: {one['reason']}" for one in result["left_out"]]
    if result["dry_run"]:
        notes.append("a dry run on tiny shapes: these are no figures of the models' speed")
    attention = result["options"]["attention"] or "the default"
    return [*lines, "", *notes, f"attention: {attention}", *provenance_lines(result["provenance"])]


def _speed_table(result: dict[str, Any]) -> list[str]:
    lines = [
        "| model | variant | AC | tokens a step | first step (s) | step (s), quartiles | tokens/s | TFLOP/s | MFU "
        "| peak memory: allocated, reserved |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in result["variants"]:
        start = _start(one)
        if "error" in one:
            lines.append(f"{start} {one['error']} | | | | | |")
            continue
        step, memory = one["step"], one["memory"]
        mfu = "unknown" if one["mfu"] is None else f"{one['mfu']:.1%}"
        used = "not measured"
        if memory is not None:
            used = f"{memory['allocated_gib']:.1f}, {memory['reserved_gib']:.1f} GiB"
        lines.append(
            f"{start} {one['first_step_seconds']:.1f} | {step['median_seconds']:.4f} "
            f"({step['p25_seconds']:.4f} – {step['p75_seconds']:.4f}) | {one['tokens_per_second']:,.0f} | "
            f"{one['tflops']:,.1f} | {mfu} | {used} |"
        )
    return lines


def _beside_trainer(variants: list[dict[str, Any]]) -> list[str]:
    """Ratios of our variants to those of the same name that transformers' Trainer ran."""
    done = {(one["model"], one["variant"]): one for one in variants if "error" not in one}
    lines = []
    for (model, name), ours in done.items():
        theirs = done.get((model, f"Trainer, {name}"))
        if theirs is None:
            continue
        speed = ours["tokens_per_second"] / theirs["tokens_per_second"]
        line = f"{model}, {name}: fsdp2kit ÷ Trainer: tokens/s {speed:.2f}"
        if ours["memory"] is not None:
            line += f", peak memory {ours['memory']['allocated_gib'] / theirs['memory']['allocated_gib']:.2f}"
        lines.append(line)
    return lines


def _profile_table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"| model | variant | AC | tokens a step | step (s) | {' | '.join(KINDS)} | idle |",
        "| --- | --- | --- | --- | --- " + "| --- " * (len(KINDS) + 1) + "|",
    ]
    for one in result["variants"]:
        if "error" in one:
            lines.append(f"{_start(one)} {one['error']} |" + " |" * (len(KINDS) + 1))
            continue
        figures = " | ".join(f"{one['shares'][kind]:.1%}" for kind in KINDS)
        lines.append(f"{_start(one)} {one['step_seconds']:.4f} | {figures} | {one['idle']:.1%} |")
    return lines


def _start(one: dict[str, Any]) -> str:
    workload = one["workload"]
    rows = workload["rows"] * workload["micro_batches"]
    words = [one["model"], one["variant"], one["activation_checkpointing"], f"{rows} × {workload['seq_len']}"]
    return f"| {' | '.join(words)} |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py gpu``."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --dry-run")
    parser.add_argument(
        "--groups", nargs="+", choices=tuple(GROUPS), default=Options.groups, help="models and variants (small 1b)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, 3 steps: does it run at all?")
    parser.add_argument("--profile", action="store_true", help="do not time, but say where the time goes")
    parser.add_argument("--attention", help="a transformers attention implementation (the config's default)")
    parser.add_argument(
        "--max-minutes", type=float, default=7.5, help="start no further variant after this long (7.5)"
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_gpu(
        Options(tuple(options.groups), options.dry_run, options.attention, options.max_minutes, options.profile)
    )
    return result, gpu_lines(result)
