"""fsdp2kit's side of a benchmark: what a recipe builds, driven a few steps at a time through its own loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from fsdp2kit.config import TrainingConfig
from fsdp2kit.distributed import World
from fsdp2kit.model.build import build_model
from fsdp2kit.model.weights import initialize, load_pretrained
from fsdp2kit.parallel.context_parallel.batch import build_shard_batch
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.context_parallel.path import AttentionPath
from fsdp2kit.parallel.mesh import Mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.progress import Progress
from fsdp2kit.train.flops import count_model_flops
from fsdp2kit.train.loop import Batches, Hooks, train
from fsdp2kit.train.metrics import JsonLines, Metrics
from fsdp2kit.train.optim import build_lr_schedule, build_optimizer
from fsdp2kit.train.plan import Plan, build_plan
from fsdp2kit.train.throughput import Throughput


@dataclass
class Trainer:
    """A model with all that `train` needs, and how far it has come."""

    model: PreTrainedModel
    optimizer: Optimizer
    schedule: LambdaLR
    batches: Batches
    to_device: Callable[[Any], dict[str, Any]]
    plan: Plan
    throughput: Throughput
    metrics: Metrics
    progress: Progress
    path: AttentionPath

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Train ``steps`` more steps, exactly as a recipe would, and return their metrics records.

        That is all of `train`: the batch and its collective, the step, throughput, and a record written to a file.
        """
        records: list[dict[str, Any]] = []

        def log(record: dict[str, Any]) -> None:
            self.metrics.log(record)
            records.append(record)

        self.progress = train(
            self.model,
            self.optimizer,
            self.schedule,
            self.batches,
            self.to_device,
            plan=replace(self.plan, total_steps=self.progress.step + steps, heeds_signals=False),
            progress=self.progress,
            throughput=self.throughput,
            hooks=Hooks(log=log, message=lambda text: None),
        )
        return records


def build_trainer(
    config: TrainingConfig, *, world: World, mesh: Mesh, batches: Batches, metrics_path: Path | None
) -> Trainer:
    """Everything that a recipe builds around the data, with the values that ``model.weights`` names. Collective.

    Args:
        batches: this data-parallel rank's loader.
        metrics_path: where the main rank writes its records; None on the others.
    """
    model = build_model(config.model)
    throughput = Throughput(count_model_flops(model), device=world.device, world_size=world.size)
    path = choose_path(config, model, cp=mesh.sizes.cp, device_type=world.device.type)
    parallelize_model(model, config, path=path, mesh=mesh, device=world.device)
    to_device = build_shard_batch(model.config, path=path, mesh=mesh, device=world.device)
    if config.model.weights == "pretrained":
        load_pretrained(model, Path(str(config.model.path)))
    else:
        initialize(model, seed=config.run.seed)
    optimizer = build_optimizer(config.optimizer, model, state_on_host=config.fsdp.offload == "optimizer")
    plan = build_plan(config, steps_per_epoch=batches.steps_per_epoch, mesh=mesh)
    lines = JsonLines(metrics_path) if metrics_path else None
    return Trainer(
        model=model,
        optimizer=optimizer,
        schedule=build_lr_schedule(config.lr_schedule, optimizer, total_steps=plan.total_steps),
        batches=batches,
        to_device=to_device,
        plan=plan,
        throughput=throughput,
        metrics=Metrics(console=None, lines=lines, wandb=None, wandb_id=None),
        progress=Progress(),
        path=path,
    )
