"""Our side of the comparison: a recipe's builders and loop, on given rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp2kit.checkpoint.state import fill_weights
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.data.loader import Batch
from fsdp2kit.job.distributed import World, gather_objects
from fsdp2kit.job.mesh import Mesh, build_mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.model.inspect import Traits, inspect_model
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parallel.context_parallel.batch import build_slice_batch
from fsdp2kit.parallel.context_parallel.layout import indices_of
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import ParallelPlan, plan_parallel
from fsdp2kit.parity.reference import Curves, Rows, gradient_of, hidden_states, named_layers
from fsdp2kit.train.loop import train_loop
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.run import Run
from fsdp2kit.train.step import accumulate_gradients, cross_entropy, next_batch
from fsdp2kit.train.throughput import Throughput


@dataclass(frozen=True)
class RankBatches:
    """Global batches as a loader that hands out a data-parallel rank's rows, in micro-batches."""

    batches: Sequence[Rows]
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return len(self.batches)

    @property
    def source_names(self) -> tuple[str, ...]:
        return ()

    def state(self, index: int) -> None:
        """None: it is not read from a stream."""

    def batch(self, index: int) -> list[Batch]:
        batch = self.batches[index]
        share = len(batch.input_ids) // self.dp_size
        mine = batch[self.dp_rank * share : (self.dp_rank + 1) * share]
        return [micro.as_batch() for micro in mine.split(self.micro_batch_size)]


class Sharded:
    """A model on its mesh with its values, and what trains it, as a recipe builds them."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        world: World,
        mesh: Mesh | None = None,
        traits: Traits | None = None,
        fill: Any = fill_weights,
    ) -> None:
        """Build the model. Every rank calls this.

        Args:
            mesh: None: the config's.
            traits: what `inspect_model` found, if it was called already.
            fill: gives the model its values.

        Raises:
            UserError: a combination that the plan refuses.
        """
        self.config = config
        self.mesh = mesh or build_mesh(config.mesh, config.fsdp, world=world)
        self.model: Any = build_model(config.model, lora=config.lora)
        self.traits = traits or inspect_model(self.model)
        self.plan: ParallelPlan = plan_parallel(
            self.model, config, self.mesh.sizes, self.mesh.device.type, traits=self.traits
        )
        self.layers = named_layers(self.model)
        parallelize_model(self.model, self.plan, mesh=self.mesh)
        fill(config.model, self.model, seed=config.run.seed)
        self.inputs = build_slice_batch(self.model.config, path=self.plan.attention, mesh=self.mesh)

    def start(self, total_steps: int, *, metrics: Path | None = None) -> None:
        """Build the optimizer, the schedule and the metrics; these also go to a file if ``metrics`` is given."""
        config = self.config
        mesh = self.mesh
        on_host = config.fsdp.offload == "optimizer"
        self.records: list[dict[str, Any]] = []
        """A record of every step that `train_loop` has made."""
        self._optimizer = build_optimizer(config.optimizer, self.model, state_on_host=on_host)
        self._schedule = build_lr_schedule(config.lr_schedule, self._optimizer, total_steps=total_steps)
        throughput = Throughput(self.plan.flops, device=mesh.device, world_size=mesh.sizes.world_size)
        self._run = Run(config, mesh, self.plan, Metrics(throughput, path=metrics, records=self.records))

    def train(self, batches: Any, *, steps: int | None = None) -> None:
        """Our loop, after `start`: so many steps more, or to the config's last."""
        self._run.total_steps = None if steps is None else self._run.progress.step + steps
        train_loop(self._run, self.model, self._optimizer, self._schedule, batches, objective=cross_entropy)

    def curves(self, batches: Sequence[Rows]) -> Curves:
        """The first batch's gradients before clipping, and the curves of the whole run. Rank 0 keeps the gradients."""
        self.start(len(batches))
        micro_batch_size = self.config.train.micro_batch_size
        mesh = self.mesh
        loader = RankBatches(batches, micro_batch_size, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
        first = next_batch(loader, 0, mesh=mesh)
        fsdp = self.config.fsdp
        accumulate_gradients(self.model, first, objective=cross_entropy, shard=self.inputs, fsdp=fsdp)
        gradients = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad and self.plan.adapter is not None:
                continue
            gradient = whole(gradient_of(parameter))  # gathering takes every rank
            if mesh.rank == 0:
                gradients[name] = gradient.float().cpu().numpy()
        self.model.zero_grad()
        self.train(loader)
        return Curves(gradients, *([record[name] for record in self.records] for name in ("loss", "grad_norm", "lr")))

    @torch.no_grad()
    def forward(self, row: Rows, *, document: range) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A forward pass over a packed row.

        Returns:
            Logits of one document, ``[n, V]``, and the row's hidden states after each decoder layer, ``[S, H]`` by the
            layer's name; float32, in the order of the sequence.
        """
        inputs = self.inputs(row.as_batch())
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "index")}
        with hidden_states(self.layers) as hidden:
            logits = self.model(**inputs, use_cache=False).logits
        reshard_all(self.model)
        length = row.input_ids.shape[1]
        positions = indices_of(
            self.mesh.cp_rank, cp=self.mesh.sizes.cp, length=length, method=self.plan.attention.method
        )
        whole_row = range(length)
        states = {name: _assemble(state[0], positions, whole_row) for name, state in hidden.items()}
        return _assemble(logits[0], positions, document), states


def whole(tensor: Any) -> Tensor:
    """The tensor itself, or a DTensor gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _assemble(local: Tensor, positions: list[int], wanted: range) -> np.ndarray:
    """``[len(wanted), …]`` from every rank's slice ``[s, …]``, whose positions each rank tells. Collective."""
    kept = [index for index, position in enumerate(positions) if position in wanted]
    mine = ([positions[index] for index in kept], local[kept].float().cpu().numpy())
    result = np.empty((len(wanted), *local.shape[1:]), dtype=np.float32)
    for at, values in gather_objects(mine):
        result[[position - wanted.start for position in at]] = values
    return result
