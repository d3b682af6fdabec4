"""A training step of fsdp2kit against the same step written by hand, alternating in one process group.

Both models start from the same files and see the same global batches in the same order, so their losses must agree
at every step. Timing alternates A B, B A, A B, …: whatever else the machine is doing hits both alike.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp2kit import distributed
from fsdp2kit.bench.figures import barrier, compare, provenance, provenance_lines, slowest_rank, summary
from fsdp2kit.bench.handwritten import HandWrittenLoop
from fsdp2kit.bench.trainer import Trainer, build_trainer
from fsdp2kit.config import TrainingConfig, load_config
from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import ChatDataConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import load_hf_config
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.model.weights import find_model_dir
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.train.global_batch import Batches

# Largest relative difference of the two losses at any step. In bfloat16 the heads round differently.
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What `bench_step` compares on."""

    model: str
    """Hugging Face directory."""
    data: str
    """Conversations, as the ``chat`` format takes them."""
    pairs: int = 60
    """Counted pairs of steps."""
    warmup: int = 3
    """Pairs before those."""
    seq_len: int = 512
    """Tokens a row."""
    global_batch: int = 2
    """Rows a step, over the whole job."""
    micro_batch: int = 1
    """Rows a forward pass."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation, on both sides."""
    cp: int = 1
    """Context-parallel ranks of fsdp2kit's side; the hand-written loop is always data-parallel over all ranks."""


class _Config(TrainingConfig):
    data: ChatDataConfig = ChatDataConfig()


def bench_step(options: StepOptions) -> dict[str, Any]:
    """Measure both loops. Every rank of the job calls this.

    Returns:
        Durations (of the slowest rank), their ratio with its interval, speeds, the losses' agreement, provenance.

    Raises:
        UserError: the model or the data cannot be read, or the sizes do not fit the ranks.
    """
    world = distributed.start()
    source = provenance(world)  # of the code as it was imported, and of the machine before this loads it
    with distributed.agreement():
        config = _config(options)
        sizes = check_config(config, world_size=world.size, local_world_size=world.local_size)
        if options.global_batch % (world.size * options.micro_batch):
            raise UserError(
                "--global-batch",
                f"{options.global_batch} is not a multiple of {world.size} ranks × --micro-batch "
                f"{options.micro_batch}, which the hand-written loop needs",
                f"use a multiple of {world.size * options.micro_batch}",
            )
    distributed.one_per_machine_first(partial(find_model_dir, config.model))
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    with distributed.agreement():
        tokenizer = build_tokenizer(config.model)
        vocab_size = load_hf_config(config.model).get_text_config().vocab_size
    deal = partial(build_data, config, tokenizer=tokenizer, vocab_size=vocab_size)
    loader = deal(dp_rank=mesh.dp_rank, dp_size=sizes.dp).loader
    plain_loader = deal(dp_rank=world.rank, dp_size=world.size).loader
    by_hand = HandWrittenLoop(
        options.model,
        param_dtype=getattr(torch, options.dtype),
        attention=config.model.attention,
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        max_grad_norm=config.train.max_grad_norm,
        device=world.device,
    )
    with tempfile.TemporaryDirectory() as folder:
        metrics_path = Path(folder) / "metrics.jsonl" if world.is_main else None
        trainer = build_trainer(config, world=world, mesh=mesh, batches=loader, metrics_path=metrics_path)
        measured = _alternate(trainer, by_hand, plain_loader, options=options, device=world.device)
    return _result(measured, options, source=source)


def _config(options: StepOptions) -> _Config:
    values = {
        "recipe": "bench",
        "run": {"resume": "never"},
        "model": {"path": options.model},
        "mesh": {"cp": options.cp},
        "fsdp": {"param_dtype": options.dtype},
        "data": {"path": options.data, "seq_len": options.seq_len},
        "train": {
            "steps": options.warmup + options.pairs,
            "global_batch_size": options.global_batch,
            "micro_batch_size": options.micro_batch,
        },
        "lr_schedule": {"name": "constant"},
        "wandb": {"mode": "disabled"},
    }
    return load_config(_Config, values, source=Path.cwd() / "bench.toml")


@dataclass(frozen=True)
class Cost:
    """What a step took on this rank."""

    seconds: float
    """By the wall clock."""
    cpu_seconds: float
    """Of this process, all threads: hardly touched by what else runs, and blind to waiting."""


@dataclass
class _Measured:
    ours: list[Cost]
    theirs: list[Cost]
    our_losses: list[float]
    their_losses: list[float]
    input_tokens: list[int]


def _alternate(
    trainer: Trainer, by_hand: HandWrittenLoop, loader: Batches, *, options: StepOptions, device: torch.device
) -> _Measured:
    measured = _Measured([], [], [], [], [])

    def run_ours() -> None:
        cost, records = _timed(partial(trainer.run, 1), device)
        measured.ours.append(cost)
        measured.our_losses.append(records[0]["loss"])
        measured.input_tokens.append(records[0]["input_tokens"])

    def run_theirs(index: int) -> None:
        batches = [(micro.input_ids, micro.labels, micro.position_ids) for micro in loader.batch(index)]
        cost, (loss, _) = _timed(partial(by_hand.step, batches), device)
        measured.theirs.append(cost)
        measured.their_losses.append(loss)

    total = options.warmup + options.pairs
    for index in range(total):
        order = [run_ours, partial(run_theirs, index)]
        for run in order if index % 2 == 0 else reversed(order):
            run()
        if torch.distributed.get_rank() == 0 and (index + 1) % 10 == 0 and index + 1 < total:
            print(f"{index + 1} of {total} pairs", file=sys.stderr, flush=True)
    return measured


def _timed(work: Any, device: torch.device) -> tuple[Cost, Any]:
    barrier(device)
    started, cpu_started = time.perf_counter(), time.process_time()
    value = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Cost(time.perf_counter() - started, time.process_time() - cpu_started), value


def _result(measured: _Measured, options: StepOptions, *, source: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = (
        slowest_rank([cost.seconds for cost in costs])[options.warmup :] for costs in (measured.ours, measured.theirs)
    )
    our_cpu, their_cpu = (
        slowest_rank([cost.cpu_seconds for cost in costs])[options.warmup :]
        for costs in (measured.ours, measured.theirs)
    )
    losses = zip(measured.our_losses, measured.their_losses, strict=True)
    difference = max(abs(a - b) / abs(b) for a, b in losses)
    tokens = sum(measured.input_tokens[options.warmup :]) / len(ours)
    sides = {}
    for name, seconds in (("fsdp2kit", ours), ("handwritten", theirs)):
        figures = summary(seconds)
        sides[name] = {**figures, "tokens_per_second": tokens / figures["median_seconds"], "seconds": seconds}
    return {
        "benchmark": "step",
        "options": asdict(options),
        **compare(ours, theirs),
        "cpu_time": compare(our_cpu, their_cpu),
        **sides,
        "tokens_per_step": tokens,
        "loss_first": measured.our_losses[0],
        "loss_last": measured.our_losses[-1],
        "loss_max_relative_difference": difference,
        "losses_agree": difference <= _LOSS_TOLERANCE[options.dtype],
        "provenance": source,
    }


def step_lines(result: dict[str, Any]) -> list[str]:
    """`bench_step`'s result for the console."""
    options = result["options"]
    mesh = f"fsdp2kit with cp {options['cp']}" if options["cp"] > 1 else "both data-parallel"
    lines = [
        f"step: {options['pairs']} alternating pairs, {options['global_batch']} × {options['seq_len']} tokens, "
        f"{options['dtype']}, {mesh}"
    ]
    for name in ("handwritten", "fsdp2kit"):
        side = result[name]
        lines.append(
            f"  {name:<12} median {side['median_seconds']:.3f} s (quartiles {side['p25_seconds']:.3f} – "
            f"{side['p75_seconds']:.3f}), {side['tokens_per_second']:,.0f} tokens/s"
        )
    cpu = result["cpu_time"]
    agree = "agree" if result["losses_agree"] else "DISAGREE: the comparison is void"
    return [
        *lines,
        f"  fsdp2kit ÷ handwritten: {result['ratio']:.3f} (95 % bootstrap interval {result['ratio_low']:.3f} – "
        f"{result['ratio_high']:.3f}); by the processes' CPU time {cpu['ratio']:.3f} ({cpu['ratio_low']:.3f} – "
        f"{cpu['ratio_high']:.3f})",
        f"  losses {agree}: largest relative difference {result['loss_max_relative_difference']:.1e} at any step "
        f"({result['loss_first']:.4f} → {result['loss_last']:.4f})",
        *provenance_lines(result["provenance"]),
    ]
