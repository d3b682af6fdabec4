"""What the workers run: our real builders and loop on a tiny model and given batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.model.build import build_model
from fsdp2kit.model.weights import load_pretrained
from fsdp2kit.parallel.context_parallel.batch import build_shard_batch
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.parallel.mesh import Mesh, build_mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.progress import Progress
from fsdp2kit.train.flops import count_model_flops
from fsdp2kit.train.loop import Hooks, build_plan, next_batch, train
from fsdp2kit.train.losses import accumulate_gradients
from fsdp2kit.train.optim import build_lr_schedule, build_optimizer
from fsdp2kit.train.throughput import Throughput
from tests.reference import LENGTH, Curves, DealtOut, Rows, make_batches


@dataclass(frozen=True)
class Case:
    """A model on a mesh; ``fsdp`` holds ``(key, value)`` of that section."""

    kind: str
    dp: int = 1
    cp: int = 1
    micro: int = 1
    fsdp: tuple[tuple[str, Any], ...] = ()
    dp_replicate: int | str = "auto"
    checkpointing: bool = False
    attention: str = "sdpa"
    method: str = "auto"
    seq_len: int = LENGTH
    pack: bool = True
    lr: float = 1e-3

    @property
    def world(self) -> int:
        return self.dp * self.cp

    def __str__(self) -> str:
        words = [self.kind, f"dp{self.dp}", f"cp{self.cp}", f"micro{self.micro}", *(str(v) for _, v in self.fsdp)]
        return "-".join(
            [
                *words,
                *(["ac"] if self.checkpointing else []),
                *([self.attention] * (self.attention != "sdpa")),
                *([self.method] * (self.method != "auto")),
            ]
        )

    def config(self, folder: Path, *, steps: int, rows: int) -> TrainingConfig:
        """The TOML that asks for this."""
        return TrainingConfig.model_validate(
            {
                "recipe": "none",
                "model": {"path": str(folder / self.kind), "attention": self.attention},
                "context_parallel": {"method": self.method},
                "data": {"seq_len": self.seq_len, "pack": self.pack},
                "mesh": {"cp": self.cp, "dp_replicate": self.dp_replicate},
                "fsdp": {"param_dtype": "float32", **dict(self.fsdp)},
                "activation_checkpointing": {"mode": "full" if self.checkpointing else "none"},
                "train": {
                    "steps": steps,
                    "global_batch_size": rows,
                    "micro_batch_size": self.micro,
                    "max_grad_norm": 0.5,
                },
                "optimizer": {"lr": self.lr, "weight_decay": 0.1},
                "lr_schedule": {"warmup_steps": 1},
            }
        )


def build(config: TrainingConfig) -> tuple[Any, Mesh, Any, Throughput]:
    """Model with its pretrained values on its mesh, and what feeds it, as a recipe builds them."""
    world = distributed.start()
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    model = build_model(config.model)
    throughput = Throughput(count_model_flops(model), device=world.device, world_size=world.size)
    path = choose_path(config, model.config, cp=mesh.sizes.cp, device_type=world.device.type)
    parallelize_model(model, config, path=path, mesh=mesh, device=world.device)
    load_pretrained(model, Path(str(config.model.path)))
    to_device = build_shard_batch(model.config, path=path, mesh=mesh, device=world.device)
    return model, mesh, to_device, throughput


def run_cases(folder: Path, cases: Sequence[Case], batches: Sequence[Rows] | None = None) -> list[Curves]:
    """Each case's curves; every rank returns the losses, rank 0 the gradients as well."""
    found = []
    for case in cases:
        try:
            found.append(run_case(folder, case, make_batches() if batches is None else batches))
        except Exception as error:
            raise RuntimeError(f"in case {case}") from error
    return found


def run_case(folder: Path, case: Case, batches: Sequence[Rows]) -> Curves:
    """First-step gradients, before clipping, then the whole run through `train`."""
    rows = len(batches[0].input_ids)
    config = case.config(folder, steps=len(batches), rows=rows)
    model, mesh, to_device, throughput = build(config)
    optimizer = build_optimizer(config.optimizer, model)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=len(batches))
    dealt = DealtOut(batches, case.micro, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
    plan = build_plan(config, steps_per_epoch=len(batches), mesh=mesh)

    first = next_batch(dealt, 0, stop=False, cp_size=mesh.sizes.cp)
    inputs = [lambda micro=micro: to_device(micro) for micro in first.micro_batches]
    accumulate_gradients(model, inputs, tokens=first.supervised_tokens, reduce_every=plan.reduce_every_micro_batch)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = whole(parameter.grad)  # every rank takes part in gathering it, one keeps it
        if dist.get_rank() == 0:
            gradients[name] = gradient.float().cpu().numpy()
    optimizer.zero_grad()

    records: list[dict[str, Any]] = []
    hooks = Hooks(log=records.append, message=lambda text: None)
    train(
        model,
        optimizer,
        schedule,
        dealt,
        to_device,
        plan=plan,
        progress=Progress(),
        throughput=throughput,
        hooks=hooks,
    )
    return Curves(
        gradients,
        [record["loss"] for record in records],
        [record["grad_norm"] for record in records],
        [record["lr"] for record in records],
    )


def whole(tensor: Any) -> Tensor:
    """The tensor itself, or a DTensor gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def losses_by_document(folder: Path, case: Case, rows: Sequence[Rows]) -> list[list[float]]:
    """For each of ``rows`` (one row each) the summed loss of every document in it, from one sharded model.

    A document's loss is what is left when every other document's labels are ignored.
    """
    model, _, to_device, _ = build(case.config(folder, steps=1, rows=1))
    found = []
    with torch.no_grad():
        for row in rows:
            starts = [*(row.position_ids[0] == 0).nonzero().squeeze(1).tolist(), row.labels.shape[1]]
            losses = []
            for start, stop in itertools.pairwise(starts):
                labels = torch.full_like(row.labels, -100)
                labels[:, start:stop] = row.labels[:, start:stop]
                batch = Rows(row.input_ids, labels, row.position_ids).as_batch()
                loss = model.loss_sum(**to_device(batch)).double()
                dist.all_reduce(loss)
                losses.append(loss.item())
            found.append(losses)
    reshard_all(model)
    return found
