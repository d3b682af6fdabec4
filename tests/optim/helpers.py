"""What the optimizer tests do on every rank: steps with given gradients, and runs that are stopped and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2kit.config.schema import FSDPConfig, TrainingConfig
from fsdp2kit.config.sections.optimizer import OptimizerConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.job.distributed import gather_objects
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.optim.host_state import keep_state_on_host
from fsdp2kit.parallel.ledger import assert_ledger, dtype_ledger
from tests.checkpoint.helpers import checkpoints_of, full_state, progress_at, sharded, tiny_llama, train

STEPS = 3


class Net(nn.Module):
    """Parameters of many shapes; two ranks share most of them unevenly, and one leaves a rank without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 256)
        self.wide = nn.Linear(512, 41)
        self.tall = nn.Linear(192, 301, bias=False)
        self.same = nn.Linear(512, 41, bias=False)
        self.odd = nn.Linear(45, 101, bias=False)
        self.row = nn.Linear(4096, 1, bias=False)
        self.norm = nn.LayerNorm(64)
        self.experts = nn.Parameter(torch.randn(5, 20, 64))
        self.head = nn.Linear(256, 97, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def gradients(step: int) -> dict[str, Tensor]:
    """Of every parameter in that step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in Net().named_parameters()}


def updated(
    section: OptimizerConfig,
    *,
    replicate: int = 1,
    shard: int | None = None,
    on_host: bool = False,
    dtype: torch.dtype = torch.float32,
    state: bool = False,
    second: bool = False,
) -> dict[str, np.ndarray]:
    """The parameters after `STEPS` steps.

    Args:
        state: with the optimizer's state of each.
        shard: ranks over which each of ``replicate`` replicas is sharded, default all; 0: nothing is.
        second: whether experts are sharded over their second dimension, so that a shard is several runs.
    """
    net = make_net().to(dtype)
    if shard != 0:
        shape = (replicate, shard or dist.get_world_size() // replicate)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        placement = (lambda parameter: Shard(1 if parameter is net.experts else 0)) if second else None
        fully_shard(net, mesh=mesh if replicate > 1 else mesh["shard"], shard_placement_fn=placement)
    optimizer = build_optimizer(section, net)
    if on_host:
        keep_state_on_host(optimizer, elements_at_once=6000)
    for step in range(STEPS):
        whole = gradients(step)
        for name, parameter in net.named_parameters():
            gradient = whole[name].to(dtype)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    found = {}
    for name, parameter in net.named_parameters():
        found[name] = _whole(parameter, replicate)
        kept = optimizer.state[parameter] if state else {}
        found |= {f"{name}.{key}": _whole(value, replicate) for key, value in kept.items()}
    return found


def _whole(tensor: Tensor, replicate: int) -> np.ndarray:
    """The whole tensor, after checking that all replicas have the same."""
    if isinstance(tensor, DTensor):
        if replicate > 1:  # full_tensor would read one replica
            parts: list[np.ndarray] = gather_objects(tensor.to_local().float().numpy(force=True))
            shard = len(parts) // replicate
            assert all(np.array_equal(part, parts[rank % shard]) for rank, part in enumerate(parts))
        tensor = tensor.full_tensor()
    return tensor.float().numpy(force=True)


def _llama(*, seed: int = 0) -> nn.Module:
    return sharded(tiny_llama(seed=seed, hidden=256))


def interrupted(run_dir: Path, section: OptimizerConfig) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The state after four steps in one go, and after two, a save, a restore into fresh objects, and two more."""
    model = _llama()
    optimizer = build_optimizer(section, model)
    train(model, optimizer, range(4))
    in_one_go = full_state(model, optimizer)

    model = _llama()
    optimizer = build_optimizer(section, model)
    train(model, optimizer, range(2))
    with checkpoints_of(run_dir, model, optimizer, async_save=True, export_hf="never") as checkpoints:
        saved = checkpoints.save(progress_at(2))
        checkpoints.wait_until_staged()
        train(model, optimizer, range(2, 3))  # what is saved must not change with it

    model = _llama(seed=1)
    optimizer = build_optimizer(section, model)
    progress = checkpoints_of(run_dir, model, optimizer).restore(saved)
    train(model, optimizer, range(progress.step, 4))
    return in_one_go, full_state(model, optimizer)


def restored(run_dir: Path, section: OptimizerConfig) -> dict[str, np.ndarray]:
    """The state that the newest checkpoint gives on this many ranks."""
    model = _llama(seed=1)
    optimizer = build_optimizer(section, model)
    checkpoints = checkpoints_of(run_dir, model, optimizer)
    path = checkpoints.resolve("auto")
    assert path is not None
    checkpoints.restore(path)
    return full_state(model, optimizer)


def trained(section: OptimizerConfig) -> dict[str, np.ndarray]:
    """The state after two steps."""
    model = _llama()
    optimizer = build_optimizer(section, model)
    train(model, optimizer, range(2))
    return full_state(model, optimizer)


def ledger_of_a_step(section: OptimizerConfig, claimed: str | None) -> str:
    """What the ledger finds, if it claims that the moments are ``claimed``."""
    model = _llama()
    optimizer = build_optimizer(section, model)
    config = TrainingConfig(recipe="none", fsdp=FSDPConfig(param_dtype="float32"), optimizer=section)
    ledger = dtype_ledger(config, export="float32")
    if claimed:
        ledger = replace(ledger, optimizer=claimed)
    try:
        with assert_ledger(ledger, model, optimizer):
            train(model, optimizer, range(1))
    except RunFailure as failure:
        return str(failure)
    return ledger.optimizer
