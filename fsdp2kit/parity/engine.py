"""Our side of the comparison: the recipe's builders and loop, on given rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.distributed import World, gather_objects
from fsdp2kit.model.build import build_model
from fsdp2kit.model.weights import load_pretrained
from fsdp2kit.parallel.context_parallel.batch import shard_batch
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.context_parallel.layout import places_of
from fsdp2kit.parallel.context_parallel.path import AttentionPath
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.parallel.mesh import Mesh, build_mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.preflight import check_model
from fsdp2kit.parity.reference import Curves, gradient_of, hidden_states, named_layers
from fsdp2kit.parity.rows import DealtOut, Rows
from fsdp2kit.progress import Progress
from fsdp2kit.train.flops import count_model_flops
from fsdp2kit.train.loop import Hooks, next_batch, train
from fsdp2kit.train.losses import accumulate_gradients
from fsdp2kit.train.optim import build_lr_schedule, build_optimizer
from fsdp2kit.train.plan import build_plan
from fsdp2kit.train.throughput import Throughput


class Sharded:
    """A model on its mesh with its pretrained values, as a recipe builds it."""

    def __init__(self, config: TrainingConfig, *, world: World) -> None:
        """Build it. Every rank calls this.

        Raises:
            UserError: a combination that preflight refuses.
        """
        self.config, self.world = config, world
        self.mesh: Mesh = build_mesh(config.mesh, config.fsdp, world=world)
        self.model: Any = build_model(config.model)
        self.path: AttentionPath = choose_path(
            config, self.model, cp=self.mesh.sizes.cp, device_type=world.device.type
        )
        check_model(self.model, config, path=self.path, device=world.device)
        self.throughput = Throughput(count_model_flops(self.model), device=world.device, world_size=world.size)
        self.layers = named_layers(self.model)
        parallelize_model(self.model, config, path=self.path, mesh=self.mesh, device=world.device)
        load_pretrained(self.model, Path(str(config.model.path)))

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Arguments of ``loss_sum`` for a micro-batch."""
        return shard_batch(
            batch.input_ids,
            batch.labels,
            batch.position_ids,
            config=self.model.config,
            path=self.path,
            cp_rank=self.mesh.cp_rank,
            cp_size=self.mesh.sizes.cp,
            device=self.world.device,
        ).inputs()

    def curves(self, batches: Sequence[Rows]) -> Curves:
        """Gradients of the first batch, before clipping, then the whole run; rank 0 keeps the gradients."""
        config, model = self.config, self.model
        optimizer = build_optimizer(config.optimizer, model, state_on_host=config.fsdp.offload == "optimizer")
        schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=len(batches))
        dealt = DealtOut(batches, config.train.micro_batch_size, dp_rank=self.mesh.dp_rank, dp_size=self.mesh.sizes.dp)
        plan = build_plan(config, steps_per_epoch=len(batches), mesh=self.mesh)
        first = next_batch(dealt, 0, stop=False, cp_size=self.mesh.sizes.cp)
        micro_batches = [lambda micro=micro: self.inputs(micro) for micro in first.micro_batches]
        accumulate_gradients(
            model,
            micro_batches,
            tokens=first.supervised_tokens,
            reduce_every=plan.reduce_every_micro_batch,
            gather_once=plan.gather_once,
        )
        gradients = {}
        for name, parameter in model.named_parameters():
            gradient = whole(gradient_of(parameter))  # every rank takes part in gathering it, one keeps it
            if not dist.is_initialized() or dist.get_rank() == 0:
                gradients[name] = gradient.float().cpu().numpy()
        optimizer.zero_grad()
        records: list[dict[str, Any]] = []
        train(
            model,
            optimizer,
            schedule,
            dealt,
            self.inputs,
            plan=plan,
            progress=Progress(),
            throughput=self.throughput,
            hooks=Hooks(log=records.append, message=lambda text: None),
        )
        columns = ([record[name] for record in records] for name in ("loss", "grad_norm", "lr"))
        return Curves(gradients, *columns)

    @torch.no_grad()
    def forward(self, row: Rows, *, document: range) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits of one document of a packed row, ``[n, V]``, and the row's hidden states after each decoder layer,
        ``[S, H]`` by the layer's name; float32, in the order of the sequence."""
        inputs = self.inputs(row)
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "index")}
        with hidden_states(self.layers) as hidden:
            logits = self.model(**inputs, use_cache=False).logits
        reshard_all(self.model)
        length = row.input_ids.shape[1]
        places = places_of(self.mesh.cp_rank, cp=self.mesh.sizes.cp, length=length, method=self.path.method)
        whole_row = range(length)
        states = {name: _assemble(state[0], places, whole_row) for name, state in hidden.items()}
        return _assemble(logits[0], places, document), states


def whole(tensor: Any) -> Tensor:
    """The tensor itself, or a DTensor gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _assemble(local: Tensor, places: list[int], wanted: range) -> np.ndarray:
    """``[len(wanted), …]`` from every rank's rows ``[s, …]``, of which each tells the places. Collective."""
    kept = [index for index, place in enumerate(places) if place in wanted]
    mine = ([places[index] for index in kept], local[kept].float().cpu().numpy())
    result = np.empty((len(wanted), *local.shape[1:]), dtype=np.float32)
    for at, values in gather_objects(mine):
        result[[place - wanted.start for place in at]] = values
    return result
