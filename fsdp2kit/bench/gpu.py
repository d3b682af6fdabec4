"""Step time, tokens/s, MFU and peak memory on one device, on random models of well-known shapes.

It needs no weights, no tokenizer and no network: the shapes stand here, the tokens are random, in documents of mixed
lengths packed into rows. FLOPs are the model's (recomputation does not count).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

from fsdp2kit.bench.harness import Side, give_back_memory, missing_packages, speed, spread, timed
from fsdp2kit.bench.sides import OurSide, bench_config, read_data, train_sides
from fsdp2kit.config import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World, local_part
from fsdp2kit.model.build import build_model
from fsdp2kit.model.flops import count_model_flops, device_peak_flops, flops_per_batch
from fsdp2kit.model.names import build_skeleton, nf4_weights

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "tie_word_embeddings")
# The shapes of HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B.
SHAPES = {
    "SmolLM2-135M": (49152, 576, 1536, 30, 9, 3, True),
    "Llama-3.2-1B": (128256, 2048, 8192, 16, 32, 8, True),
    "Llama-3.2-3B": (128256, 3072, 8192, 28, 24, 8, True),
    "Llama-3.1-8B": (128256, 4096, 14336, 32, 32, 8, False),
}
_TINY = (256, 64, 96, 2, 4, 2, True)
BARS = {"tokens/s": ["tokens_per_second"], "peak memory (bytes)": ["allocated_bytes"]}

# A variant's name is made of these parts. Each has overrides, and packages that it needs.
SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "bfloat16": ([], []),
    "Trainer": ([], ["accelerate"]),  # transformers' Trainer trains it; it has only some of our settings
    "compiled": (["compile.enabled=true"], []),
    "float8": (["float8.recipe=rowwise"], ["torchao"]),
    "selective recomputation": (["activation_checkpointing.mode=selective"], []),
    "full recomputation": (["activation_checkpointing.mode=full"], []),
    "8-bit moments": (["optimizer.name=adamw_8bit"], ["torchao"]),
    "bfloat16 parameters and moments": (["optimizer.name=adamw_bf16", "fsdp.storage_dtype=bfloat16"], []),
    "moments on the host": (["fsdp.offload=optimizer"], []),
    "LoRA": (["lora.rank=16", "lora.alpha=32"], ["peft"]),
    "QLoRA": (["lora.rank=16", "lora.alpha=32", "lora.quantize=nf4"], ["peft"]),
}
# The most useful first: a loan may end before the last.
_SPEED = ["bfloat16, compiled", "bfloat16", "Trainer, bfloat16", "Trainer, bfloat16, compiled", "float8, compiled"]
# Without checkpointing where one H200 (139 GiB) has room: parameters, gradients and moments in float32 take 16 bytes a
# parameter. For 8B that is 128 GB, which leaves no room: its variants take less.
_MOMENTS = ("8-bit moments", "bfloat16 parameters and moments", "moments on the host")
_LORA = ["LoRA", "Trainer, LoRA", "LoRA, compiled", "QLoRA, compiled"]
GROUPS: dict[str, tuple[str, int, int, list[str]]] = {
    "small": ("SmolLM2-135M", 4, 2048, ["bfloat16", "Trainer, bfloat16", "full recomputation"]),
    "1b": ("Llama-3.2-1B", 2, 8192, [*_SPEED, "selective recomputation", "full recomputation"]),
    "3b": ("Llama-3.2-3B", 1, 8192, _SPEED),
    "8b": ("Llama-3.1-8B", 1, 8192, [f"selective recomputation, {name}" for name in _MOMENTS]),
    "lora_16k": ("Llama-3.1-8B", 1, 16384, [f"{name}, full recomputation" for name in _LORA]),
    "lora_4k": ("Llama-3.1-8B", 2, 4096, _LORA),
}
"""Model, rows of a step, tokens of a row, variants. Each group takes at most nine minutes."""

OTHERS = "elementwise and others"
# The first pattern that matches counts. Names are those of CUDA's libraries, Inductor and torch; on a CPU, of ATen.
_KINDS: tuple[tuple[str, str], ...] = (
    (OTHERS, r"^triton_(?:poi|red|per)"),  # Inductor names a kernel after everything it fused
    ("collectives", r"nccl|gloo|c10d"),
    ("attention", r"flash|fmha|attention|softmax_warp"),
    ("matmul", r"gemm|cutlass|nvjet|cublas|xmma|wgmma|aten::(?:mm|addmm|bmm|linear|matmul|_scaled_mm)|scaled_mm"),
    ("optimizer", r"multi_tensor_apply|adam|aten::_(?:fused|foreach)_"),
    ("copies", r"Memcpy|Memset|copy_|_to_copy|fsdp::|split_with_sizes|chunk_cat"),
    (OTHERS, ""),
)


def bench_gpu(
    world: World,
    *,
    groups: tuple[Literal["small", "1b", "3b", "8b", "lora_16k", "lora_4k"], ...] = ("small", "1b"),
    dry_run: bool = False,
    profile: bool = False,
) -> Iterator[dict[str, Any]]:
    """Step time, MFU and memory on one device: one variant after the other, since two do not fit into memory.

    Args:
        groups: models and variants.
        dry_run: tiny shapes, 6 steps; does it run at all?
        profile: instead of timing, the shares of kinds of kernels in a step.
    """
    if world.size != 1:
        raise UserError("bench gpu", "runs on one device, in one process", "start it with python, not torchrun")
    if world.device.type != "cuda" and not dry_run:
        raise UserError("bench gpu", "finds no CUDA device", "try it here with --device cpu --dry-run")
    notes = ["a dry run on tiny shapes: no figures of speed"] if dry_run else []
    rows: list[dict[str, Any]] = []
    for group, name in ((one, name) for one in groups for name in GROUPS[one][3]):
        if profile and name.startswith("Trainer"):
            continue
        row: dict[str, Any] = {"model": GROUPS[group][0], "variant": name}
        try:
            if reason := obstacle(name, device=world.device):
                row["error"] = reason
            else:
                config = config_of(group, name, dry_run=dry_run)
                row |= _profile(config, world=world) if profile else _time(name, config, world=world)
        except (torch.cuda.OutOfMemoryError, UserError) as problem:
            row["error"] = str(problem).splitlines()[0]
        for ours in rows:  # step by step on the same batches
            if (row["model"], name) == (ours["model"], f"Trainer, {ours['variant']}") and "step" in ours.keys() & row:
                row["fsdp2kit_is_faster"] = speed(ours["step"]["all"], row["step"]["all"])
        rows.append(row)
        give_back_memory()
        yield {"rows": rows, "notes": notes, "bars": BARS}


def config_of(group: str, name: str, *, dry_run: bool) -> TrainingConfig:
    """The config of a variant of this name in its group; for a dry run a tiny model on short rows."""
    shape, rows, seq_len, _ = GROUPS[group]
    sizes = dict(zip(_SIZES, _TINY if dry_run else SHAPES[shape], strict=True))
    rows, seq_len, steps = (2, 64, 6) if dry_run else (rows, seq_len, 15)
    values = {
        "model": {"config": {"model_type": "llama", "max_position_embeddings": 8192, **sizes}, "weights": "random"},
        "data": {"format": "synthetic", "seq_len": seq_len},
        "train": {"steps": steps, "global_batch_size": rows, "micro_batch_size": rows},
    }
    return bench_config(values, overrides=[each for part in name.split(", ") for each in SETTINGS[part][0]])


def obstacle(name: str, *, device: torch.device) -> str | None:
    """Why a variant of this name cannot run here; None if it can be tried."""
    parts = name.split(", ")
    if missing := missing_packages(*(package for part in parts for package in SETTINGS[part][1])):
        return f"{missing[0]} is not installed"
    if device.type == "cpu" and "compiled" in parts:
        return "compiled variants are for a device"
    if device.type == "cuda" and "float8" in parts and torch.cuda.get_device_capability(device) < (8, 9):
        return "the device has no float8 matmuls"
    return None


def _fill_on_the_device(_section: object, model: Any, *, seed: int) -> None:
    """Fill with random values, fast: training draws them on the host, which takes longer than the steps for 8B."""
    torch.manual_seed(seed)
    shapes, device = build_skeleton(model).state_dict(), next(model.parameters()).device
    for name, fill in nf4_weights(model).items():
        fill(0.02 * torch.randn(shapes[name].shape, device=device))
    for values in (local_part(p.detach()) for p in model.parameters() if p.is_floating_point()):
        _ = values.normal_(std=0.02) if values.ndim > 1 else values.fill_(1.0)


def _time(name: str, config: TrainingConfig, *, world: World) -> dict[str, Any]:
    device, steps = world.device, config.train.steps or 0
    warmup = steps // 3
    if name.startswith("Trainer"):
        from fsdp2kit.bench.hf_trainer import HFSide  # which imports accelerate

        side: Side = HFSide("hf_trainer", config, world=world)
    else:
        side = OurSide(config, world=world, fill=_fill_on_the_device)
    found = train_sides({"side": side}, rounds=steps - warmup, warmup=warmup, world=world)["side"]
    counts = count_model_flops(build_model(config.model, lora=config.lora))  # on meta
    loader, _ = read_data(config, dp_rank=0, dp_size=1)
    batches = [micro for index in range(warmup, steps) for micro in loader.batch(index)]
    pairs, tokens = sum(micro.attention_pairs for micro in batches), sum(found["input_tokens"])
    flops = flops_per_batch(counts, tokens=tokens, attention_pairs=pairs)
    seconds, peak, on_cuda = sum(found["seconds"]), device_peak_flops(device), device.type == "cuda"
    return {
        "rows": f"{config.train.global_batch_size} × {config.data.seq_len}",
        "first_step_seconds": found["first_step_seconds"],
        "step": spread(found["seconds"]),
        "tokens_per_second": tokens / seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": None if peak is None else flops / seconds / peak,
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_cuda else None,
        "losses": found["losses"],
    }


def _profile(config: TrainingConfig, *, world: World) -> dict[str, Any]:
    """The shares of three traced steps, after two steps that are not traced."""
    side, activity = OurSide(config, world=world, fill=_fill_on_the_device), torch.profiler.ProfilerActivity
    try:
        side.build()
        with torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if world.device.type == "cuda" else [activity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        ) as profiler:
            for _ in range(5):
                # It waits until the device is idle, so that a step's kernels are in its window.
                timed(side.step, device=world.device)
                profiler.step()
    finally:
        side.stop()
    return shares(profiler.events() or ())


def kind_of(name: str) -> str:
    """The kind of a kernel (on a CPU: of an operator) by its name."""
    return next(kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))


def shares(events: Iterable[Any]) -> dict[str, Any]:
    """Seconds of a traced step, the share of each kind of kernel, and the share of idle time.

    Kernels of several streams may run at once, and a CPU's operators in several threads. The shares then add up to
    more than 1.

    Args:
        events: of torch's profiler.
    """
    marks = [event for event in events if event.name.startswith("ProfilerStep") and event.device_type.name == "CPU"]
    total = sum(mark.time_range.elapsed_us() for mark in marks)
    work = [event for event in events if not event.is_user_annotation and not event.is_async]
    on_device = [event for event in work if event.device_type.name == "CUDA"]
    busy = dict.fromkeys((kind for kind, _ in _KINDS[1:]), 0.0)
    covered, reached = 0.0, 0.0
    for event in sorted(on_device or work, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        # An operator's own time does not include the operators that it calls.
        busy[kind_of(event.name)] += end - start if on_device else event.self_cpu_time_total
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {
        "step_seconds": total / len(marks) / 1e6,
        **{kind: duration / total for kind, duration in busy.items()},
        "idle": max(0.0, 1 - covered / total),
    }
