"""The sides of a comparison: fsdp2kit, a hand-written loop, transformers' Trainer, TRL's SFTTrainer; on the same data.

Each side trains the same files' model with the same optimizer on the same conversations, batched in its own way, and
is driven a step at a time. Other libraries are imported only where their side is built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.bench.handwritten import HandWrittenLoop
from fsdp2kit.bench.trainer import Trainer, build_trainer
from fsdp2kit.config import TrainingConfig, load_config
from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import ChatDataConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.data.loader import Loader
from fsdp2kit.distributed import World, gather_objects
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import load_hf_config
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.train.global_batch import Batches

NEEDS: dict[str, tuple[str, ...]] = {
    "fsdp2kit": (),
    "handwritten": (),
    "trl": ("accelerate", "trl"),
    "trl_without_ac": ("accelerate", "trl"),
    "trl_padded": ("accelerate", "trl"),
    "hf_trainer_padded": ("accelerate",),
    "hf_trainer_longest": ("accelerate",),
    "fsdp2kit_padded": (),
}
"""Every side, and the packages that it needs beside ours."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all sides train on."""

    model: str
    """Hugging Face directory."""
    data: str
    """Conversations, as the ``chat`` format takes them."""
    steps: int
    """Optimizer steps of each side, at most."""
    seq_len: int = 512
    """Tokens of a row; the longest document."""
    global_batch: int = 2
    """Rows a step, over the whole job."""
    micro_batch: int = 1
    """Rows a forward pass."""
    conversations: int = 3
    """Conversations a rank takes at once where they are padded to the longest of them: about a row's worth."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the computation."""
    cp: int = 1
    """Context-parallel ranks of fsdp2kit's sides; all others are data-parallel."""
    overrides: tuple[str, ...] = ()
    """Of fsdp2kit's config, as on the command line of a run."""


@dataclass(frozen=True)
class Work:
    """What a step did, over the whole job."""

    loss: float
    """Mean over the supervised tokens of all ranks."""
    supervised_tokens: int
    input_tokens: int
    """Without padding."""
    grad_norm: float | None = None
    """Before clipping; None where the side does not tell."""


class Side(Protocol):
    """One of the loops that are compared. Every rank calls each method."""

    def prepare(self) -> None:
        """What does not count, before the clock starts."""

    def step(self) -> None:
        """One optimizer step."""

    def outcome(self) -> Work:
        """What that step did, when the clock has stopped."""
        ...

    def describe(self) -> str:
        """What was really run, in words."""
        ...

    def stop(self) -> None:
        """End it."""


class Conversations(TrainingConfig):
    """fsdp2kit's config of a comparison."""

    data: ChatDataConfig = ChatDataConfig()


def missing_packages(name: str) -> list[str]:
    """The packages that this side needs and that are not installed."""
    return [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]


def build_config(workload: Workload, *, pack: bool, world: World) -> Conversations:
    """What a user would write into a TOML.

    Raises:
        UserError: sizes that do not fit each other or the ranks.
    """
    values = {
        "recipe": "bench",
        "run": {"resume": "never"},
        "model": {"path": workload.model},
        "mesh": {"cp": workload.cp},
        "fsdp": {"param_dtype": workload.dtype},
        "data": {"path": workload.data, "seq_len": workload.seq_len, "pack": pack},
        "train": {
            "steps": workload.steps,
            "global_batch_size": workload.global_batch,
            "micro_batch_size": workload.micro_batch,
        },
        "lr_schedule": {"name": "constant"},
        "wandb": {"mode": "disabled"},
    }
    config = load_config(Conversations, values, source=Path.cwd() / "bench.toml", overrides=workload.overrides)
    check_config(config, world_size=world.size, local_world_size=world.local_size)
    if workload.global_batch % (world.size * workload.micro_batch):
        raise UserError(
            "--global-batch",
            f"{workload.global_batch} is not a multiple of {world.size} ranks × --micro-batch {workload.micro_batch}, "
            "which data-parallel loops need",
            f"use a multiple of {world.size * workload.micro_batch}",
        )
    return config


def build_side(name: str, workload: Workload, *, world: World, metrics_path: Path) -> Side:
    """Build one side, with the values that the files hold. Every rank calls this.

    Raises:
        UserError: the model or the data cannot be read, or the sizes do not fit.
    """
    pack = name in ("fsdp2kit", "handwritten")  # the others are given documents
    with distributed.agreement():
        config = build_config(workload, pack=pack, world=world)
        tokenizer = build_tokenizer(config.model)
        vocab_size = load_hf_config(config.model).get_text_config().vocab_size
    deal = partial(build_data, config, tokenizer=tokenizer, vocab_size=vocab_size)
    if name.startswith("fsdp2kit"):
        mesh = build_mesh(config.mesh, config.fsdp, world=world)
        loader = deal(dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp).loader
        path = metrics_path.with_name(f"{name}.jsonl") if world.is_main else None
        return OurSide(build_trainer(config, world=world, mesh=mesh, batches=loader, metrics_path=path), config)
    loader = deal(dp_rank=world.rank, dp_size=world.size).loader
    if name == "handwritten":
        return _build_handwritten(config, loader, workload=workload, world=world)
    if not isinstance(loader, Loader):
        raise UserError("--set", "data.streaming cannot be read by several loops", "leave it out")
    from fsdp2kit.bench.hf_sides import build_hf_side

    return build_hf_side(name, config, loader, tokenizer=tokenizer, workload=workload, world=world)


class OurSide:
    """fsdp2kit's own loop: reading the batch, the collective of that, the step, the speeds, a record in a file."""

    def __init__(self, trainer: Trainer, config: TrainingConfig) -> None:
        self._trainer, self._config = trainer, config
        self._record: dict[str, Any] = {}

    def prepare(self) -> None:
        """Nothing: reading the batch counts."""

    def step(self) -> None:
        """All of `train`, for one step."""
        self._record = self._trainer.run(1)[0]

    def outcome(self) -> Work:
        """As the record has it."""
        record = self._record
        return Work(record["loss"], record["tokens"], record["input_tokens"], record["grad_norm"])

    def describe(self) -> str:
        """The config that matters."""
        config = self._config
        on_cpu = next(self._trainer.model.parameters()).device.type == "cpu"
        exchange = ", shards exchanged by messages from rank to rank" if on_cpu else ""
        rows = "packed rows" if config.data.pack else "one conversation a row, padded"
        return (
            f"fully_shard ({config.fsdp.strategy}), {config.fsdp.param_dtype} compute, {config.fsdp.reduce_dtype} "
            f"reduction, {rows} of {config.data.seq_len}, {self._trainer.path}{exchange}"
        )

    def stop(self) -> None:
        """Close its file of records."""
        self._trainer.metrics.close(ok=True)


class Loop(Protocol):
    """Somebody else's loop, as a function of a global batch."""

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor]], /) -> tuple[float, float]:
        """One optimizer step on this rank's ``(input_ids, labels, position_ids)``: loss and gradient norm."""
        ...


L = TypeVar("L", bound=Loop)


class LoopSide(Generic[L]):
    """Such a loop on our batches, which are read outside the clock, as if workers had hidden that."""

    def __init__(self, loop: L, batches: Batches, *, ran: str) -> None:
        self.loop = loop
        self._batches, self._ran = batches, ran
        self._index, self._micro_batches, self._outcome = 0, [], (0.0, 0.0)

    def prepare(self) -> None:
        """Read the next batch."""
        self._micro_batches = self._batches.batch(self._index)
        self._index += 1

    def step(self) -> None:
        """The loop's own."""
        self._outcome = self.loop.step(
            [(micro.input_ids, micro.labels, micro.position_ids) for micro in self._micro_batches]
        )

    def outcome(self) -> Work:
        """Counts of all ranks."""
        mine = [(micro.supervised_tokens, micro.input_tokens) for micro in self._micro_batches]
        counts = [count for rank in gather_objects(mine) for count in rank]
        loss, norm = self._outcome
        return Work(loss, sum(count[0] for count in counts), sum(count[1] for count in counts), norm)

    def describe(self) -> str:
        """As whoever built it says."""
        return self._ran

    def stop(self) -> None:
        """Nothing runs between steps."""


def _build_handwritten(
    config: TrainingConfig, batches: Batches, *, workload: Workload, world: World
) -> LoopSide[HandWrittenLoop]:
    loop = HandWrittenLoop(
        workload.model,
        param_dtype=getattr(torch, workload.dtype),
        attention="sdpa",
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        max_grad_norm=config.train.max_grad_norm,
        device=world.device,
    )
    ran = f"fully_shard by hand, {workload.dtype} compute, float32 reduction, the same packed rows, attention sdpa"
    return LoopSide(loop, batches, ran=ran)
