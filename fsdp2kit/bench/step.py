"""A training step of fsdp2kit against the same step written by hand, alternating in one process group.

Both models start from the same files and see the same global batches in the same order, so their losses must agree
at every step.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp2kit import distributed
from fsdp2kit.bench.figures import positive, provenance, provenance_lines
from fsdp2kit.bench.handwritten import HandWrittenLoop
from fsdp2kit.bench.pairs import Pairs, pairs_lines
from fsdp2kit.bench.trainer import build_trainer
from fsdp2kit.config import TrainingConfig, load_config
from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import ChatDataConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import load_hf_config
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.model.weights import find_model_dir
from fsdp2kit.parallel.mesh import build_mesh

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
        pairs, total = Pairs(), range(options.warmup + options.pairs)
        pairs.alternate(trainer, by_hand, plain_loader, total, device=world.device)
    return {
        "benchmark": "step",
        "options": asdict(options),
        **pairs.result("handwritten", skip=options.warmup, tolerance=_LOSS_TOLERANCE[options.dtype]),
        "provenance": source,
    }


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


def step_lines(result: dict[str, Any]) -> list[str]:
    """`bench_step`'s result for the console."""
    options = result["options"]
    mesh = f"fsdp2kit with cp {options['cp']}" if options["cp"] > 1 else "both data-parallel"
    return [
        f"step: {options['pairs']} alternating pairs, {options['global_batch']} × {options['seq_len']} tokens, "
        f"{options['dtype']}, {mesh}",
        *pairs_lines(result, "handwritten"),
        *provenance_lines(result["provenance"]),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py step``."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--data", required=True, metavar="FILE", help="conversations (format chat)")
    parser.add_argument("--pairs", type=positive, default=60, help="pairs of steps that count (60)")
    parser.add_argument("--warmup", type=positive, default=3, help="pairs before those (3)")
    parser.add_argument("--seq-len", type=positive, default=512, help="tokens a row (512)")
    parser.add_argument("--global-batch", type=positive, default=2, help="rows a step, over all ranks (2)")
    parser.add_argument("--micro-batch", type=positive, default=1, help="rows a forward pass (1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--cp", type=positive, default=1, help="context-parallel ranks on fsdp2kit's side (1)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_step(
        StepOptions(
            model=options.model,
            data=options.data,
            pairs=options.pairs,
            warmup=options.warmup,
            seq_len=options.seq_len,
            global_batch=options.global_batch,
            micro_batch=options.micro_batch,
            dtype=options.dtype,
            cp=options.cp,
        )
    )
    return result, step_lines(result)
