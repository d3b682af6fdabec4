"""FSDP1 and fsdp2kit side by side on one TOML: step time, peak memory and loss, on the same batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fsdp2kit import distributed
from fsdp2kit.bench.contest import Course, take_turns
from fsdp2kit.bench.figures import provenance, provenance_lines
from fsdp2kit.bench.fsdp1 import FSDP1Loop, check_fsdp1
from fsdp2kit.bench.memory import peak_of
from fsdp2kit.bench.pairs import pair_result, pairs_lines
from fsdp2kit.bench.sides import LoopSide, OurSide, Side
from fsdp2kit.bench.trainer import build_trainer
from fsdp2kit.config import TrainingConfig, dump_toml
from fsdp2kit.config.checks import check_config
from fsdp2kit.data.build import build_data
from fsdp2kit.distributed import World, gather_objects
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.model.build import build_model, load_hf_config
from fsdp2kit.model.choose_loss import choose_loss
from fsdp2kit.model.weights import find_model_dir
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.fsdp import describe_fsdp
from fsdp2kit.parallel.mesh import Mesh, build_mesh
from fsdp2kit.parallel.preflight import check_model
from fsdp2kit.train.claim import claim_run_dir
from fsdp2kit.train.rundir import describe_environment, prepare_run_dir

# Largest relative difference of the two losses at any step. In 16 bits the heads round differently.
_LOSS_TOLERANCE = 1e-5
_LOSS_TOLERANCE_16_BITS = 2e-2


def check_comparison(config: TrainingConfig, *, world_size: int, local_world_size: int, warmup: int) -> None:
    """Refuse what cannot be compared: what FSDP1 cannot do, and what cannot be read or started twice.

    Raises:
        UserError: naming the key.
    """
    check_fsdp1(config, sizes=check_config(config, world_size=world_size, local_world_size=local_world_size))
    if config.train.steps is None or config.train.steps <= warmup:
        what = "leaves no step to count" if config.train.steps is not None else "is not given"
        raise UserError("train.steps", what, f"use more than baseline.warmup = {warmup}")
    if config.data.streaming:
        raise UserError("data.streaming", "cannot be read by two loops in turns", "set it to false")
    if config.model.weights not in ("pretrained", "random"):
        raise UserError("model.weights", "is a checkpoint, which FSDP1 does not read", "export it, and use model.path")


def compare_fsdp1(config: TrainingConfig, *, build_tokenizer: Callable[[], Any], warmup: int) -> dict[str, Any]:
    """Train ``train.steps`` steps on both sides, the first ``warmup`` each side alone, the others in turns.

    Peak memory is taken in the first steps, with the other side idle, and counted above what the process had before a
    side was built. Ours goes first, so what a process needs once (buffers of the backend, say) is counted as ours.
    Nothing is evaluated, saved or exported. The result is printed, and written to ``comparison.json``.

    Args:
        build_tokenizer: of the data, which may need none; called where a mistake in it is agreed on.
        warmup: steps that do not count.

    Raises:
        UserError: what `check_comparison` refuses, or a mistake in the model or the data.
        RunFailure: the losses do not agree.
    """
    world = distributed.start(timeout_minutes=config.run.timeout_minutes, deterministic=config.run.deterministic)
    record = provenance(world)
    check_comparison(config, world_size=world.size, local_world_size=world.local_size, warmup=warmup)
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    source = distributed.one_per_machine_first(partial(find_model_dir, config.model))
    run_dir = Path(config.run.dir)
    with distributed.agreement():
        tokenizer = build_tokenizer()
        hf_config = load_hf_config(config.model)
        model = build_model(config.model, hf_config=hf_config)
        path = choose_path(config, model, cp=1, device_type=world.device.type)
        loss = choose_loss(config, model, device=world.device)
        check_model(model, config, path=path, device=world.device)
        ours = describe_fsdp(config, model, sizes=mesh.sizes, device_type=world.device.type)
        claim = claim_run_dir(run_dir, is_main=world.is_main)
        environment = describe_environment(world_size=world.size, mesh=asdict(mesh.sizes), dtype_ledger={})
        prepare_run_dir(run_dir, config_text=dump_toml(config), environment=environment, is_main=world.is_main)
    vocab_size = hf_config.get_text_config().vocab_size
    data = build_data(config, tokenizer=tokenizer, vocab_size=vocab_size, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
    with claim:
        result = _measure(config, data.loader, mesh=mesh, world=world, source=source, warmup=warmup)
        result |= {
            "fsdp2kit_ran": [*ours, str(path), str(loss)],
            "config": config.model_dump(mode="json"),
            "provenance": record,
        }
        if world.is_main:
            (run_dir / "comparison.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            print("\n".join(comparison_lines(result)), flush=True)
    if not result["losses_agree"]:
        raise RunFailure("the losses of FSDP1 and fsdp2kit do not agree; the comparison is void")
    return result


def _measure(
    config: TrainingConfig,
    loader: Any,
    *,
    mesh: Mesh,
    world: World,
    source: Path | None,
    warmup: int,
) -> dict[str, Any]:
    assert config.train.steps is not None, "check_comparison has seen to it"
    device, courses = world.device, {"fsdp2kit": Course(), "fsdp1": Course()}

    def build_ours() -> OurSide:
        metrics_path = Path(config.run.dir) / "comparison.jsonl" if world.is_main else None
        if metrics_path:
            metrics_path.unlink(missing_ok=True)
        return OurSide(
            build_trainer(config, world=world, mesh=mesh, batches=loader, metrics_path=metrics_path), config
        )

    def build_theirs() -> LoopSide[FSDP1Loop]:
        loop = FSDP1Loop(config, mesh=mesh, source=source, device=device, total_steps=config.train.steps or 0)
        return LoopSide(loop, loader, ran=f"FullyShardedDataParallel: {_in_words(loop.describe())}")

    def warm_up(side: Side) -> None:
        course = courses["fsdp2kit" if isinstance(side, OurSide) else "fsdp1"]
        for _ in range(warmup):
            course.take_step(side, device=device)

    ours, our_peak = peak_of(build_ours, warm_up, device=device)
    try:
        theirs, their_peak = peak_of(build_theirs, warm_up, device=device)
        take_turns({"fsdp2kit": ours, "fsdp1": theirs}, courses, config.train.steps - warmup, world=world)
    finally:
        ours.stop()
    is_exact = {config.fsdp.param_dtype, config.fsdp.storage_dtype, config.fsdp.reduce_dtype} == {"float32"}
    tolerance = _LOSS_TOLERANCE if is_exact else _LOSS_TOLERANCE_16_BITS
    peaks = gather_objects({"fsdp2kit": our_peak, "fsdp1": their_peak})
    return {
        "benchmark": "fsdp1",
        **pair_result(courses["fsdp2kit"], courses["fsdp1"], "fsdp1", skip=warmup, tolerance=tolerance),
        "peak_bytes": {name: _largest([each[name] for each in peaks]) for name in ("fsdp2kit", "fsdp1")},
        "fsdp1_ran": theirs.loop.describe(),
    }


def _in_words(arguments: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in arguments.items())


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def comparison_lines(result: dict[str, Any]) -> list[str]:
    """`compare_fsdp1`'s result for the console."""
    config, ran, peaks = result["config"], result["fsdp1_ran"], result["peak_bytes"]
    train = config["train"]
    lines = [
        f"fsdp1: {len(result['fsdp1']['seconds'])} alternating pairs, {train['global_batch_size']} × "
        f"{config['data']['seq_len']} tokens, {config['fsdp']['param_dtype']}",
        f"  fsdp1 ran FullyShardedDataParallel: {_in_words(ran)}",
        f"  fsdp2kit ran fully_shard: {'; '.join(result['fsdp2kit_ran'])}; "
        "its step includes reading the batch and writing metrics",
        *pairs_lines(result, "fsdp1"),
    ]
    if peaks["fsdp2kit"] is not None and peaks["fsdp1"] is not None:
        ratio = peaks["fsdp2kit"] / peaks["fsdp1"]
        lines.append(
            f"  peak memory of the largest rank, each side alone: fsdp1 {peaks['fsdp1'] / 2**20:,.0f} MiB, fsdp2kit "
            f"{peaks['fsdp2kit'] / 2**20:,.0f} MiB, ratio {ratio:.3f}"
        )
    return [*lines, *provenance_lines(result["provenance"])]
