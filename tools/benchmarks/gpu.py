"""Step time, tokens/s, MFU and peak memory on one device, on random models of well-known shapes.

It needs no weights, no tokenizer and no network: the shapes stand here, the tokens are random, in documents of mixed
lengths packed into rows. FLOPs are the model's (recomputation does not count).
"""

from __future__ import annotations

import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from fsdp2kit.config import TrainingConfig
from fsdp2kit.console import show
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World, local_part
from fsdp2kit.model.build import build_model
from fsdp2kit.model.flops import count_model_flops, device_peak_flops, flops_per_batch
from fsdp2kit.planner.devices import GIB, this_device
from fsdp2kit.planner.estimate import Known, estimate, plan_for
from fsdp2kit.weights.modules import build_skeleton, packed_weights
from tools.benchmarks.harness import Side, give_back_memory, missing_packages, speed, spread, timed
from tools.benchmarks.shares import shares
from tools.benchmarks.sides import OurSide, bench_config, read_data, train_sides


def _llama(
    vocabulary: int, hidden: int, width: int, layers: int, heads: int, key_heads: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _llama(49152, 576, 1536, 30, 9, 3, True),
    "Llama-3.2-1B": _llama(128256, 2048, 8192, 16, 32, 8, True),
    "Llama-3.2-3B": _llama(128256, 3072, 8192, 28, 24, 8, True),
    "Llama-3.1-8B": _llama(128256, 4096, 14336, 32, 32, 8, False),
    "Qwen3-30B-A3B, 8 layers": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    # Every fourth layer has attention, the others have a state.
    "Qwen3.5-9B, 8 layers": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""Values of a model's config. Of the last two, the whole models have more layers."""

_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_TINY_OF_TYPE: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
    },
}
BARS = {"tokens/s": ["tokens_per_second"], "peak memory (bytes)": ["allocated_bytes"]}

# A variant's name is made of these parts. Each has overrides, and packages that it needs.
SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "bfloat16": ([], []),
    "Trainer": ([], ["accelerate"]),  # transformers' Trainer trains it; it has only some of our settings
    "compiled": (["compile.enabled=true"], []),
    "float8 tensorwise": (["float8.recipe=tensorwise"], ["torchao"]),
    "float8 rowwise": (["float8.recipe=rowwise"], ["torchao"]),
    "selective recomputation": (["activation_checkpointing.mode=selective"], []),
    "full recomputation": (["activation_checkpointing.mode=full"], []),
    "8-bit moments": (["optimizer.name=adamw_8bit"], ["torchao"]),
    "bfloat16 parameters and moments": (["optimizer.name=adamw_bf16", "fsdp.storage_dtype=bfloat16"], []),
    "moments on the host": (["fsdp.offload=optimizer"], []),
    "LoRA": (["lora.rank=16", "lora.alpha=32"], ["peft"]),
    "QLoRA": (["lora.rank=16", "lora.alpha=32", "lora.quantize=nf4"], ["peft"]),
}


class Group(NamedTuple):
    """Variants of a model on the same kind of rows."""

    shape: str
    rows: int | None
    """Rows of a step, which is one micro-batch; None: as many as fit, by the planner."""
    seq_len: int
    variants: list[str]
    """The most useful first: a loan may end before the last."""
    steps: int = 10
    """Steps that count, after a quarter as many that do not, and at least three."""


# Without checkpointing where one H200 (139 GiB) has room: parameters, gradients and moments in float32 take 16 bytes a
# parameter. For 8B that is 128 GB, which leaves no room: its variants take less.
_MOMENTS = ("8-bit moments", "bfloat16 parameters and moments", "moments on the host")
_LORA = ["LoRA", "Trainer, LoRA", "LoRA, compiled", "QLoRA, compiled"]
_FLOAT8 = ["float8 tensorwise, compiled", "float8 rowwise, compiled"]
_SPEED = ["bfloat16, compiled", "Trainer, bfloat16, compiled", "bfloat16", "Trainer, bfloat16"]
_RECOMPUTATION = ["selective recomputation, compiled", "selective recomputation", "full recomputation"]
GROUPS: dict[str, Group] = {
    "small": Group("SmolLM2-135M", 4, 2048, ["bfloat16", "Trainer, bfloat16", "full recomputation"]),
    "1b": Group("Llama-3.2-1B", None, 8192, [*_SPEED, *_RECOMPUTATION], steps=20),
    "3b": Group("Llama-3.2-3B", None, 8192, _SPEED, steps=20),
    "8b": Group("Llama-3.1-8B", 1, 8192, [f"selective recomputation, {name}" for name in _MOMENTS]),
    "float8_3b": Group("Llama-3.2-3B", None, 8192, ["bfloat16, compiled", *_FLOAT8], steps=20),
    "float8_8b": Group(
        "Llama-3.1-8B",
        None,
        8192,
        [f"selective recomputation, {_MOMENTS[1]}, {name}" for name in ("compiled", *_FLOAT8)],
    ),
    "moe": Group(
        "Qwen3-30B-A3B, 8 layers", 4, 4096, ["bfloat16, compiled", "bfloat16", "Trainer, bfloat16"], steps=20
    ),
    # Packed documents and torch.compile exclude each other in layers with a state.
    "hybrid": Group("Qwen3.5-9B, 8 layers", 2, 4096, ["bfloat16", "selective recomputation"], steps=5),
    "lora_16k": Group("Llama-3.1-8B", 1, 16384, [f"{name}, full recomputation" for name in _LORA]),
    "lora_4k": Group("Llama-3.1-8B", 2, 4096, _LORA),
}

_FILL = 0.9
"""Share of a device's memory that the planned peak may take. Context, libraries and fragments need the rest."""
_MOST_ROWS = 8
_DRY_ROWS = 2
_DRY_SEQ_LEN = 64
_DRY_STEPS = 4
_DRY_MEMORY = 4608 * 2**10
"""Bytes. A dry run on a CPU chooses rows for an imagined device with this memory."""
_NOT_HERE = ("unsloth", "torchtune")
"""Alternatives without a side here."""


def bench_gpu(
    world: World,
    *,
    groups: tuple[
        Literal["small", "1b", "3b", "8b", "float8_3b", "float8_8b", "moe", "hybrid", "lora_16k", "lora_4k"], ...
    ] = ("small", "1b"),
    variants: tuple[str, ...] = (),
    dry_run: bool = False,
    profile: bool = False,
) -> Iterator[dict[str, Any]]:
    """Step time, MFU and memory on one device: one variant after the other, since two do not fit into memory.

    Args:
        groups: models and variants.
        variants: only these of the groups' variants.
        dry_run: tiny shapes, few steps; does it run at all?
        profile: instead of timing, the shares of kinds of kernels in a step, and the kernels that are no products.
    """
    if world.size != 1:
        raise UserError("bench gpu", "runs on one device, in one process", "start it with python, not torchrun")
    if world.device.type != "cuda" and not dry_run:
        raise UserError("bench gpu", "finds no CUDA device", "try it here with --device cpu --dry-run")
    chosen = _chosen(groups, variants)
    notes = [f"not compared: {name} is not installed" for name in missing_packages(*_NOT_HERE)]
    if dry_run:
        notes.insert(0, "a dry run on tiny shapes: no figures of speed")
    rows: list[dict[str, Any]] = []
    found: dict[tuple[str, str], dict[str, Any]] = {}
    failed = False
    for group, name in chosen:
        if profile and name.startswith("Trainer"):
            continue
        row: dict[str, Any] = {"model": GROUPS[group].shape, "variant": name}
        try:
            if reason := obstacle(name, device=world.device):
                row["error"] = reason
            else:
                row |= _measure(group, name, world=world, dry_run=dry_run, profile=profile)
        except (torch.cuda.OutOfMemoryError, UserError) as problem:
            row["error"] = str(problem).splitlines()[0]
        except Exception as problem:  # the next variant is still worth a try
            failed = True
            row["error"] = f"{type(problem).__name__}: {next(iter(str(problem).splitlines()), '')}"
            show(traceback.format_exc(), file=sys.stderr)
        ours = found.get((group, name.removeprefix("Trainer, ")), {})
        if "step" in ours.keys() & row.keys():
            work = ours["input_tokens"], row["input_tokens"]
            row["fsdp2kit_is_faster"] = speed(ours["step"]["all"], row["step"]["all"], work=work)
        found[group, name] = row
        rows.append(row)
        torch.compiler.reset()  # what was compiled for other rows would be compiled again, for rows of any number
        give_back_memory()
        checks = {"no variant failed": False} if failed else {}
        yield {"rows": rows, "notes": notes, "checks": checks, "bars": BARS}


def _chosen(groups: tuple[str, ...], variants: tuple[str, ...]) -> list[tuple[str, str]]:
    """Groups and the names of their variants, in the order in which they are measured."""
    every = [(group, name) for group in groups for name in GROUPS[group].variants]
    names = dict.fromkeys(name for _, name in every)
    for name in variants:
        if name not in names:
            todo = f"choose from: {'; '.join(names)}"
            raise UserError("--variants", f"{name!r} is no variant of {', '.join(groups)}", todo)
    return [(group, name) for group, name in every if not variants or name in variants]


def config_of(group: str, name: str, *, dry_run: bool, rows: int | None = None) -> TrainingConfig:
    """The config of a variant of this name in its group; for a dry run a tiny model on short rows.

    Args:
        rows: of a step; None: the group's, or one where the planner chooses.
    """
    shape, own_rows, seq_len, _, steps = GROUPS[group]
    model = SHAPES[shape]
    if dry_run:
        model = {**model, **_TINY, **_TINY_OF_TYPE[model["model_type"]]}
        own_rows = own_rows and _DRY_ROWS
        seq_len = _DRY_SEQ_LEN
        steps = _DRY_STEPS
    rows = rows or own_rows or 1
    values = {
        "model": {"config": model, "weights": "random"},
        "data": {"format": "synthetic", "seq_len": seq_len},
        "train": {"steps": steps + _warmup(steps), "global_batch_size": rows, "micro_batch_size": rows},
        "checkpoint": {"export_hf": "never"},
    }
    return bench_config(values, overrides=[each for part in name.split(", ") for each in SETTINGS[part][0]])


def _warmup(steps: int) -> int:
    """How many steps come before those that count."""
    return max(3, steps // 4)


def obstacle(name: str, *, device: torch.device) -> str | None:
    """Why a variant of this name cannot run here; None if it can be tried."""
    parts = name.split(", ")
    if missing := missing_packages(*(package for part in parts for package in SETTINGS[part][1])):
        return f"{missing[0]} is not installed"
    if device.type == "cpu" and "compiled" in parts:
        return "compiled variants are for a device"
    is_float8 = any(part.startswith("float8") for part in parts)
    if device.type == "cuda" and is_float8 and torch.cuda.get_device_capability(device) < (8, 9):
        return "the device has no float8 matmuls"
    return None


def fitting_rows(group: str, name: str, *, memory: int, dry_run: bool) -> tuple[int, int]:
    """How many rows of a variant fit into a device, eight at most, and the peak that is planned for them, in bytes.

    The plan is of a step that is not compiled; a compiled one takes less.

    Args:
        memory: of the device, in bytes. The planned peak takes at most 90 % of it.

    Raises:
        UserError: not one row fits.
    """
    known: Known = {}

    def planned(rows: int) -> int:
        config = config_of(group, name, dry_run=dry_run, rows=rows)
        model, plan = plan_for(config, world_size=1, local_world_size=1, known=known)
        return estimate(config, model, plan).peak.total

    rows = bisect_right(range(1, _MOST_ROWS + 1), _FILL * memory, key=planned)
    if rows == 0:
        what = f"one row needs {planned(1) / GIB:.1f} GiB, which are more than {_FILL:.0%} of {memory / GIB:.1f}"
        raise UserError(f"bench gpu, {group}", what, "take a group of a smaller model")
    return rows, planned(rows)


def halved_until_it_fits(measure: Callable[[int], dict[str, Any]], rows: int) -> tuple[dict[str, Any], list[int]]:
    """What ``measure`` returns for ``rows``, or for half as many while the device runs out of memory.

    Returns:
        That, and the numbers of rows for which memory ran out.

    Raises:
        torch.OutOfMemoryError: not one row fits.
    """
    too_many: list[int] = []
    while True:
        try:
            return measure(rows), too_many
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        # The error is gone now, and with it what its frames held.
        too_many.append(rows)
        rows //= 2
        torch.compiler.reset()
        give_back_memory()


def _measure(group: str, name: str, *, world: World, dry_run: bool, profile: bool) -> dict[str, Any]:
    """A variant's figures, at the rows of its group or at those that fit."""
    planned: dict[str, int] = {}
    warmup = _warmup(_DRY_STEPS if dry_run else GROUPS[group].steps)
    rows = config_of(group, name, dry_run=dry_run).train.micro_batch_size
    if GROUPS[group].rows is None:
        device = this_device(world.device)
        memory = _DRY_MEMORY if device is None else device.memory
        rows, peak = fitting_rows(group, name, memory=memory, dry_run=dry_run)
        planned = {} if name.startswith("Trainer") else {"planned_bytes": peak}

    def measured(rows: int) -> dict[str, Any]:
        config = config_of(group, name, dry_run=dry_run, rows=rows)
        figures = _profile(config, world=world) if profile else _time(name, config, warmup=warmup, world=world)
        return {"rows": f"{rows} × {config.data.seq_len}", **figures}

    figures, too_many = halved_until_it_fits(measured, rows)
    if too_many:
        figures["out_of_memory_with_rows"] = ", ".join(map(str, too_many))
        return figures  # the planned peak is one of more rows
    return {**figures, **planned}


def _fill_on_the_device(_section: object, model: Any, *, seed: int) -> None:
    """Fill with random values, fast: training draws them on the host, which takes longer than the steps for 8B."""
    torch.manual_seed(seed)
    shapes = build_skeleton(model).state_dict()
    device = next(model.parameters()).device
    for name, fill in packed_weights(model).items():
        fill(0.02 * torch.randn(shapes[name].shape, device=device))
    for values in (local_part(p.detach()) for p in model.parameters() if p.is_floating_point()):
        _ = values.normal_(std=0.02) if values.ndim > 1 else values.fill_(1.0)


def _time(name: str, config: TrainingConfig, *, warmup: int, world: World) -> dict[str, Any]:
    """The figures of a variant's steps.

    Args:
        warmup: steps at the beginning that do not count.
    """
    device = world.device
    steps = config.train.steps or 0
    if name.startswith("Trainer"):
        from tools.benchmarks.hf_trainer import HFSide  # which imports accelerate

        side: Side = HFSide("hf_trainer", config, world=world)
    else:
        side = OurSide(config, world=world, fill=_fill_on_the_device)
    found = train_sides({"side": side}, rounds=steps - warmup, warmup=warmup, world=world)["side"]
    counts = count_model_flops(build_model(config.model, lora=config.lora))  # on meta
    loader, _ = read_data(config, dp_rank=0, dp_size=1)
    batches = [loader.batch(index) for index in range(warmup, steps)]
    pairs = sum(micro.attention_pairs for batch in batches for micro in batch)
    # The batches' own: a side of transformers counts padding, too.
    input_tokens = [sum(micro.input_tokens for micro in batch) for batch in batches]
    tokens = sum(input_tokens)
    flops = flops_per_batch(counts, tokens=tokens, attention_pairs=pairs)
    seconds = sum(found["seconds"])
    peak = device_peak_flops(device)
    on_cuda = device.type == "cuda"
    return {
        "first_step_seconds": found["first_step_seconds"],
        "step": spread(found["seconds"]),
        "tokens_per_second": tokens / seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": None if peak is None else flops / seconds / peak,
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_cuda else None,
        "input_tokens": input_tokens,
        "losses": found["losses"],
    }


def _profile(config: TrainingConfig, *, world: World) -> dict[str, Any]:
    """The shares of three traced steps, after two steps that are not traced."""
    side = OurSide(config, world=world, fill=_fill_on_the_device)
    activity = torch.profiler.ProfilerActivity
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
