"""fsdp2kit's own side: what a recipe builds is assembled here and nowhere else, and driven through its own loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.run import fill_weights
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.schema import ProfileConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.distributed import World
from fsdp2kit.model.build import build_model
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parallel.mesh import Mesh, build_mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import ParallelPlan, plan_parallel
from fsdp2kit.progress import Progress
from fsdp2kit.train.loop import train
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.step import Batches, cross_entropy
from fsdp2kit.train.throughput import Throughput


@dataclass
class Ours:
    """A model with all that `train` needs, and how far it has come."""

    config: TrainingConfig
    model: PreTrainedModel
    plan: ParallelPlan
    mesh: Mesh
    optimizer: Optimizer
    schedule: LambdaLR
    batches: Batches
    metrics: Metrics
    records: list[dict[str, Any]]
    """The metrics' records so far."""
    progress: Progress

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Train ``steps`` more steps, exactly as a recipe would, and return their metrics records.

        That is all of `train`: the batch and its collective, the step, throughput, and a record written to a file.
        """
        before = len(self.records)
        until = self.config.train.model_copy(update={"steps": self.progress.step + steps, "epochs": None})
        self.progress = train(
            self.model,
            self.optimizer,
            self.schedule,
            self.batches,
            objective=cross_entropy,
            config=self.config.model_copy(update={"train": until}),
            plan=self.plan,
            mesh=self.mesh,
            metrics=self.metrics,
            progress=self.progress,
        )
        return self.records[before:]


def build_ours(
    config: TrainingConfig, *, world: World, batches: Batches | None = None, metrics_path: Path | None = None
) -> Ours:
    """Everything that a recipe builds, with the values that ``model.weights`` names. Collective.

    Args:
        batches: what this data-parallel rank trains on; None: its share of the data that ``config`` names.
        metrics_path: where the main rank writes its records.

    Raises:
        UserError: the model or the data cannot be read, or do not fit each other.
    """
    config = config.model_copy(update={"profile": ProfileConfig()})
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    model = build_model(config.model)
    plan = plan_parallel(model, config, mesh.sizes, world.device.type)
    loader = batches or read_data(config, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)[0]
    parallelize_model(model, plan, mesh=mesh)
    fill_weights(config.model, model, seed=config.run.seed)
    optimizer = build_optimizer(config.optimizer, model, state_on_host=config.fsdp.offload == "optimizer")
    total_steps = config.train.total_steps(loader.steps_per_epoch)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=total_steps)
    records: list[dict[str, Any]] = []
    throughput = Throughput(plan.flops, device=world.device, world_size=world.size)
    metrics = Metrics(throughput, path=metrics_path, records=records)
    return Ours(config, model, plan, mesh, optimizer, schedule, loader, metrics, records, Progress())


def read_data(config: Any, *, dp_rank: int, dp_size: int) -> tuple[Any, Any]:
    """This data-parallel rank's loader of the data that ``config`` names, and the tokenizer. Collective.

    Raises:
        UserError: the tokenizer or the data cannot be read.
    """
    tokenizer = None if config.data.format == "synthetic" else build_tokenizer(config.model)
    share = SimpleNamespace(dp_rank=dp_rank, sizes=SimpleNamespace(dp=dp_size))
    return build_data(config, tokenizer=tokenizer, model=build_model(config.model), mesh=share).loader, tokenizer


def load_ours(config: TrainingConfig, *, mesh: Mesh) -> PreTrainedModel:
    """The model over ``mesh`` with the values that ``model.weights`` names, and nothing else. Collective."""
    model = build_model(config.model)
    parallelize_model(model, plan_parallel(model, config, mesh.sizes, mesh.device.type), mesh=mesh)
    fill_weights(config.model, model, seed=config.run.seed)
    return model
