"""What FSDP1's state dicts and optimizer conversions did, `torch.distributed.checkpoint.state_dict` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from tests.migrate.helpers import LAYERS, TOKENS, Schedule, difference, fsdp1, fsdp2, loss, own, plain, quiet, whole
from tests.support.models import full
from tests.support.workers import WorkerPool

TIGHT = 1e-5
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _state_dicts() -> dict[str, Any]:
    reference, old, new = plain().state_dict(), fsdp1(plain()), fsdp2(plain())
    with quiet(), FSDP1.state_dict_type(old, StateDictType.FULL_STATE_DICT):
        theirs = old.state_dict()
    full = get_model_state_dict(new, options=FULL)
    with Schedule(new) as seen:
        sharded = new.state_dict()
    local = {name: value.to_local() for name, value in sharded.items()}
    other = fsdp2(plain())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    given = dict(full)  # empty but on rank 0; torch puts the shards in the place of what it is given
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, given, options=options)
    loaded = {name: whole(parameter.detach()) for name, parameter in other.named_parameters()}
    return {
        "on rank 0": sorted(full) == sorted(reference) if dist.get_rank() == 0 else not full,
        "equal": all(
            torch.equal(full[name], reference[name]) and torch.equal(full[name], theirs[name]) for name in full
        ),
        "free": not seen.events and all(isinstance(value, DTensor) for value in sharded.values()),
        "share": sum(value.numel() for value in local.values()) / sum(v.numel() for v in sharded.values()),
        "loaded": all(torch.equal(value, reference[name]) for name, value in loaded.items()),
    }


def test_full_sharded_and_local_state_dicts(pool: WorkerPool) -> None:
    for found in pool.run(2, _state_dicts):
        assert found["on rank 0"]
        assert found["equal"]
        assert found["free"], "a sharded state dict sends nothing"
        assert found["share"] == pytest.approx(0.5, rel=0.01)
        assert found["loaded"]


def _optimizer(name: str, model: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    optimizer.zero_grad()
    loss(model, tokens).backward()
    optimizer.step()


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """Moments by ``name.field``."""
    return {
        f"{name}.{field}": whole(value)
        for name, fields in state["state"].items()
        for field, value in fields.items()
        if field != "step"
    }


def _optimizer_states(name: str, from_fsdp1: bool) -> dict[str, Any]:
    """A step, its optimizer state gathered on rank 0, given to a new model and optimizer, and another step."""
    reference, model = plain(), fsdp1(plain()) if from_fsdp1 else fsdp2(plain())
    plain_optimizer, optimizer = _optimizer(name, reference), _optimizer(name, model)
    _step(reference, plain_optimizer, TOKENS)
    _step(model, optimizer, own())
    # The same call names a plain optimizer's numbered states: what rekeying was for.
    expected = _flat(get_optimizer_state_dict(reference, plain_optimizer))
    if from_fsdp1:
        with quiet():
            state = FSDP1.full_optim_state_dict(model, optimizer, rank0_only=True)
            with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                weights = model.state_dict()
    else:
        state = get_optimizer_state_dict(model, optimizer, options=FULL)
        weights = get_model_state_dict(model, options=FULL)
    gathered = difference(_flat(state), expected) if dist.get_rank() == 0 else len(state.get("state", {}))
    other = fsdp2(plain())
    other_optimizer = _optimizer(name, other)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=options)
    set_optimizer_state_dict(other, other_optimizer, state, options=options)
    _step(other, other_optimizer, own())
    _step(reference, plain_optimizer, TOKENS)
    after = {key: parameter.detach() for key, parameter in reference.named_parameters()}
    found = {key: whole(parameter.detach()) for key, parameter in other.named_parameters()}
    return {"names": len(expected), "gathered": gathered, "after": difference(found, after)}


@pytest.mark.parametrize(
    ("name", "from_fsdp1", "fields"),
    # On the CPU, FSDP1 gathers both of Adam's moments into one buffer, and returns the second twice.
    [("adamw", False, 2), full("sgd", False, 1), full("sgd", True, 1)],
)
def test_optimizer_states_are_named_gathered_and_sharded(
    name: str, from_fsdp1: bool, fields: int, pool: WorkerPool
) -> None:
    for rank, found in enumerate(pool.run(2, _optimizer_states, name, from_fsdp1)):
        assert found["names"] == fields * (9 * LAYERS + 2)
        assert found["gathered"] < (TIGHT if rank == 0 else 1), "rank 0 alone has all of it"
        assert found["after"] < TIGHT
