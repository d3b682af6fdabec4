"""What the workers run: our real builders and loop on a tiny model and given batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import Mesh, build_mesh
from fsdp2kit.job.progress import Progress
from fsdp2kit.model.inspect import Traits
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import Curves, Rows
from fsdp2kit.train.balance import NoBalance
from fsdp2kit.train.loop import train_loop, train_step
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.run import Run
from fsdp2kit.train.saving import NoCheckpoints
from fsdp2kit.train.step import GlobalBatch, MetricNames, accumulate_gradients, cross_entropy
from fsdp2kit.train.throughput import Throughput
from tests.support.models import LENGTH, STEPS, make_batches, plain_batches


@dataclass(frozen=True)
class Case:
    """A model on a mesh; ``fsdp`` holds ``(key, value)`` of that section."""

    kind: str
    dp: int = 1
    cp: int = 1
    micro: int = 1
    fsdp: tuple[tuple[str, Any], ...] = ()
    dp_replicate: int | str = "auto"
    checkpointing: bool | str = False
    """A mode, or whether "full"."""
    attention: str = "sdpa"
    method: str = "auto"
    seq_len: int = LENGTH
    pack: bool = True
    lr: float = 1e-3
    frozen: tuple[str, ...] = ()
    liger: bool = False
    adapter: str | None = None
    """The adapter that is trained, in the folder ``kind-adapter``."""
    quantize: str = "none"
    """What the model that it belongs to is stored in."""
    compiled: bool = False
    ep: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.cp

    def __str__(self) -> str:
        """The kind, the options of ``fsdp``, and all else that is not the default."""
        rest = [f for f in fields(self) if f.name not in ("kind", "fsdp") and getattr(self, f.name) != f.default]
        words = [self.kind, *(str(value) for _, value in self.fsdp)]
        return "-".join([*words, *(f"{f.name}={getattr(self, f.name)}" for f in rest)])

    def config(self, folder: Path, *, steps: int, rows: int) -> TrainingConfig:
        """The TOML that asks for this."""
        mode: Any = self.checkpointing
        return TrainingConfig.model_validate(
            {
                "recipe": "none",
                "model": {
                    "path": str(folder / self.kind),
                    "attention": self.attention,
                    "freeze": list(self.frozen),
                    "liger": self.liger,
                    "adapter": self.adapter and str(folder / f"{self.kind}-{self.adapter}"),
                },
                "lora": {"quantize": self.quantize} if self.adapter else {},
                "context_parallel": {"method": self.method},
                "data": {"seq_len": self.seq_len, "pack": self.pack},
                "mesh": {"cp": self.cp, "dp_replicate": self.dp_replicate, "ep": self.ep},
                "fsdp": {"param_dtype": "float32", **dict(self.fsdp)},
                "activation_checkpointing": {"mode": {True: "full", False: "none"}.get(mode, mode)},
                "compile": {"enabled": self.compiled},
                "train": {
                    "steps": steps,
                    "global_batch_size": rows,
                    "micro_batch_size": self.micro,
                    "max_grad_norm": 0.5,
                },
                "optimizer": {"lr": self.lr, "weight_decay": 0.1},
                "lr_schedule": {"warmup_steps": min(1, max(0, steps - 1))},
            }
        )


def build(config: TrainingConfig) -> Sharded:
    """A model with its pretrained values on its mesh, as a recipe builds it."""
    return Sharded(config, world=distributed.start())


class Recorder(Metrics):
    """Metrics that are kept; ``on_log`` is called with each record."""

    def __init__(self, sharded: Sharded, *, on_log: Callable[[dict[str, Any]], object] = lambda record: None) -> None:
        mesh = sharded.mesh
        super().__init__(Throughput(sharded.plan.flops, device=mesh.device, world_size=mesh.sizes.world_size))
        self.records: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self._on_log = on_log

    def log(self, record: Mapping[str, Any], **_: Any) -> None:
        self.records.append(dict(record))
        self._on_log(dict(record))

    def message(self, text: str) -> None:
        self.messages.append(text)


class Saves(NoCheckpoints):
    """Checkpoints that are only counted."""

    def __init__(self, on_save: Callable[[int], object] = lambda step: None) -> None:
        self.steps: list[int] = []
        self._on_save = on_save

    def save(self, progress: Progress, *, is_over: bool) -> None:
        self.steps.append(progress.step)
        self._on_save(progress.step)


def run_loop(sharded: Sharded, batches: Any, *, metrics: Metrics, **options: Any) -> Progress:
    """`train_loop` on what a recipe would build around the model; ``options`` are those of `train_loop` and `Run`."""
    config = sharded.config
    optimizer = build_optimizer(config.optimizer, sharded.model)
    progress, checkpoints = options.pop("progress", None) or Progress(), options.pop("checkpoints", None)
    steps = config.train.steps or 0
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=steps, step=progress.step)
    run = Run(config, sharded.mesh, sharded.plan, metrics, progress, checkpoints)
    return train_loop(run, sharded.model, optimizer, schedule, batches, **{"objective": cross_entropy, **options})


def step(sharded: Sharded, optimizer: Any, schedule: Any, batch: Any, *, number: int = 1) -> dict[str, float]:
    """`train_step` on what a recipe would build around the model."""
    run = Run(sharded.config, sharded.mesh, sharded.plan, Recorder(sharded), Progress(step=number - 1))
    names = MetricNames()
    names._is_first = False  # as in the middle of a run: the ranks have agreed on the objective's metrics
    return train_step(
        run,
        sharded.model,
        optimizer,
        schedule,
        batch,
        objective=cross_entropy,
        names=names,
        shard=sharded.inputs,
        balance=NoBalance(),
    )


def global_batch(rows: Rows, micro_batches: Sequence[Rows] | None = None) -> GlobalBatch:
    """A global batch whose counts are those of ``rows``, which this rank reads in ``micro_batches``."""
    whole, parts = rows.as_batch(), [part.as_batch() for part in micro_batches or [rows]]
    items = whole.supervised_tokens
    counts = (items, whole.supervised_tokens, whole.input_tokens, whole.attention_pairs, whole.capacity)
    return GlobalBatch(parts, *counts, tokens_by_source={}, stop=False, save_failed=False, save_due=False, seconds=0.0)


def accumulate(sharded: Sharded, rows: Rows, micro_batches: Sequence[Rows] | None = None) -> Any:
    """`accumulate_gradients` over `global_batch`."""
    return accumulate_gradients(
        sharded.model,
        global_batch(rows, micro_batches),
        objective=cross_entropy,
        shard=sharded.inputs,
        fsdp=sharded.config.fsdp,
    )


@contextmanager
def counted_compilations(**options: Any) -> Iterator[list[int]]:
    """A list that gets an entry whenever a layer is compiled: traced and differentiated as ever, but not lowered.

    Args:
        options: of `torch.nn.Module.compile`.
    """
    compilations: list[int] = []
    original = torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compilations.append(len(inputs))
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    gc.collect()  # an earlier case's models may not go while Dynamo iterates over FSDP's weak references
    torch.compile = partial(original, backend=backend, **options)
    try:
        yield compilations
    finally:
        torch.compile = original


class Cases:
    """Cases that run one after the other in one process, which share meshes and what is known of a model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._meshes: dict[tuple, Mesh] = {}
        self._traits: dict[tuple, Traits] = {}

    def curves(self, case: Case, batches: Sequence[Rows]) -> Curves:
        """First-step gradients, before clipping, then the whole run through `train_loop`."""
        config = case.config(self._folder, steps=len(batches), rows=len(batches[0].input_ids))
        world = distributed.start()
        key = case.cp, case.dp_replicate, case.ep, config.fsdp.strategy
        if key not in self._meshes:
            self._meshes[key] = build_mesh(config.mesh, config.fsdp, world=world)
        traits = self._traits.get((case.kind, case.adapter))
        sharded = Sharded(config, world=world, mesh=self._meshes[key], traits=traits)
        self._traits[case.kind, case.adapter] = sharded.traits
        return sharded.curves(batches)


def run_cases(
    folder: Path, cases: Sequence[Case], batches: Sequence[Rows] | None = None, *, steps: int = STEPS
) -> list[Curves]:
    """Each case's curves; every rank returns the losses, rank 0 the gradients as well."""
    found, together = [], Cases(folder)
    for case in cases:
        own = batches or (make_batches(steps) if case.pack else plain_batches(steps))
        # Units inside a layer break its graph where they are.
        whole = "unit_classes" not in dict(case.fsdp)
        try:
            with counted_compilations(fullgraph=whole) if case.compiled else nullcontext([1]) as compilations:
                found.append(together.curves(case, own))
            assert compilations, "nothing was compiled"
        except Exception as error:
            raise RuntimeError(f"in case {case}") from error
    return found


def run_case(folder: Path, case: Case, batches: Sequence[Rows]) -> Curves:
    """A case's curves."""
    return Cases(folder).curves(case, batches)
