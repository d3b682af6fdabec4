"""One step of training, with what it sends."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from fsdp2kit.job import distributed
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parity.engine import RankBatches, Sharded
from fsdp2kit.train.step import next_batch
from tests.support.cases import Case, step
from tests.support.host_syncs import HostSyncs, count_host_syncs, host_tensors
from tests.support.models import make_batches
from tests.support.traffic import Traffic, count_traffic

BYTES = {"float32": 4, "bfloat16": 2}


def one_step(folder: Path, case: Case) -> Traffic:
    """What this rank sends in the second of two steps, from reading the batch to the optimizer."""
    return watched_step(folder, case)[0]


def watched_step(folder: Path, case: Case, *, by_operators: bool = True) -> tuple[Traffic, HostSyncs | None]:
    """The same, and the waits of the host for the device in that step.

    Args:
        by_operators: whether operators are watched, too, for these waits and for what DTensors send.
    """
    config = case.config(folder, steps=2, rows=8)
    sharded = Sharded(config, world=distributed.start())
    optimizer = build_optimizer(config.optimizer, sharded.model)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=2)
    batches = make_batches(2, rows=8)
    loader = RankBatches(batches, case.micro, dp_rank=sharded.mesh.dp_rank, dp_size=sharded.mesh.sizes.dp)
    for index in range(2):
        with count_traffic(functional=by_operators) as traffic:
            batch = next_batch(loader, index, mesh=sharded.mesh)
            known = host_tensors(batch.micro_batches, optimizer)
            with count_host_syncs(sharded.mesh.device, host=known) if by_operators else nullcontext() as syncs:
                step(sharded, optimizer, schedule, batch, number=index + 1)
    return traffic, syncs
