"""What the methods of FSDP1 did, and the calls that do it now: each against FSDP1, or against the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2kit.parallel.fsdp import reshard_all
from tests.migrate.helpers import (
    LAYERS,
    TOKENS,
    Schedule,
    difference,
    fsdp1,
    fsdp2,
    gradients,
    loss,
    own,
    plain,
    quiet,
    reference_gradients,
    whole,
)
from tests.support.workers import WorkerPool

TIGHT = 1e-5


def _clip() -> dict[str, float]:
    reference, old, new = plain(), fsdp1(plain()), fsdp2(plain())
    loss(reference, TOKENS).backward()
    for model in (old, new):
        loss(model, own()).backward()
    norms = {
        "plain": nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item(),
        "old": old.clip_grad_norm_(0.1).item(),
        "new": whole(nn.utils.clip_grad_norm_(new.parameters(), 0.1)).item(),
    }
    expected = gradients(reference)
    return {**norms, "old error": difference(gradients(old), expected), "error": difference(gradients(new), expected)}


def test_clip_grad_norm(pool: WorkerPool) -> None:
    for found in pool.run(2, _clip):
        assert found["new"] == pytest.approx(found["plain"], rel=TIGHT)
        assert found["new"] == pytest.approx(found["old"], rel=TIGHT)
        assert found["new"] > 0.1, "nothing was clipped"
        assert found["error"] < TIGHT


def _no_sync() -> dict[str, Any]:
    expected = {name: gradient * 2 for name, gradient in reference_gradients().items()}
    found = {}
    for name, model in (("old", fsdp1(plain())), ("new", fsdp2(plain()))):
        with Schedule(model) as seen:
            if isinstance(model, FSDP1):
                with model.no_sync():
                    loss(model, own()).backward()
            else:
                model.set_requires_gradient_sync(False)
                loss(model, own()).backward()
                model.set_requires_gradient_sync(True)
            reduced = [seen.events.count("r")]
            loss(model, own()).backward()
            reduced.append(seen.events.count("r"))
        found[name] = (reduced, difference(gradients(model), expected))
    return found


@pytest.mark.full
def test_no_sync(pool: WorkerPool) -> None:
    for found in pool.run(2, _no_sync):
        for reduced, error in found.values():
            assert reduced == [0, LAYERS + 1]
            assert error < TIGHT


def _summon() -> dict[str, Any]:
    reference, old, new = plain().state_dict(), fsdp1(plain()), fsdp2(plain())
    with FSDP1.summon_full_params(old):
        summoned = {name.replace("_fsdp_wrapped_module.", ""): value.clone() for name, value in old.named_parameters()}
    found = {name: whole(parameter.detach()) for name, parameter in new.named_parameters()}
    # FSDP1 wrote back what was changed inside the context; here a whole tensor is sharded again.
    with torch.no_grad():
        for parameter in new.parameters():
            changed = parameter.full_tensor() + 1
            parameter.copy_(distribute_tensor(changed, parameter.device_mesh, parameter.placements))
    written = {name: whole(parameter.detach()) - 1 for name, parameter in new.named_parameters()}
    # One unit at a time, without names: what its module computes with, until it is freed again.
    layer = new.model.layers[0]
    layer.unshard()
    unsharded = isinstance(layer.mlp.up_proj.weight, DTensor)
    reshard_all(new)
    return {
        "same": all(
            torch.equal(found[name], summoned[name]) and torch.equal(found[name], reference[name]) for name in found
        ),
        "names": found.keys() == summoned.keys(),
        "written": difference(written, {name: reference[name] for name in written}),
        "unit": (unsharded, isinstance(layer.mlp.up_proj.weight, DTensor)),
    }


@pytest.mark.full
def test_summon_full_params(pool: WorkerPool) -> None:
    for found in pool.run(2, _summon):
        assert found["same"]
        assert found["names"]
        assert found["written"] < TIGHT
        assert found["unit"] == (False, True)


class HalvingReduceScatter:
    """A communication hook: sums in float64, and hands on half the sum."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        total = input_tensor.double()
        dist.all_reduce(total, group=group)
        mine = total.chunk(group.size())[group.rank()]
        output_tensor.copy_(mine / 2)


def _halve_old(_: Any, full: Tensor, shard: Tensor) -> None:
    dist.reduce_scatter_tensor(shard, full)
    shard /= 2 * dist.get_world_size()


def _hooks() -> dict[str, float]:
    expected = {name: gradient / 2 for name, gradient in reference_gradients().items()}
    old, first, second = fsdp1(plain()), fsdp2(plain()), fsdp2(plain())
    old.register_comm_hook(None, _halve_old)
    for module in first.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(HalvingReduceScatter())
    for module in second.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda shard: shard.div_(2))
    found = {}
    for name, model in (("old", old), ("reduce-scatter", first), ("after it", second)):
        with quiet():
            loss(model, own()).backward()
        found[name] = difference(gradients(model), expected)
    return found


@pytest.mark.full
def test_communication_hooks(pool: WorkerPool) -> None:
    for found in pool.run(2, _hooks):
        assert max(found.values()) < TIGHT, found


def _modules() -> dict[str, Any]:
    old, new = fsdp1(plain()), fsdp2(plain())

    def doubled(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.weight is not getattr(head, "weight", None):
            with torch.no_grad():
                module.weight.mul_(2)

    found: dict[str, Any] = {}
    for name, model in (("old", old), ("new", new)):
        head = model.get_output_embeddings() if name == "new" else None
        model.apply(doubled)
        found[name] = model
    with FSDP1.summon_full_params(old):
        theirs = {name: p.clone() for name, p in old.named_parameters() if "mlp" in name}
    ours = {name: whole(p.detach()) for name, p in new.named_parameters() if "mlp" in name}
    units = [module for module in new.modules() if isinstance(module, FSDPModule)]
    return {
        "applied": all(torch.equal(a, b) for a, b in zip(ours.values(), theirs.values(), strict=True)),
        "changed": any(
            not torch.equal(ours[name], value) for name, value in plain().named_parameters() if name in ours
        ),
        "units": (len(units), len(FSDP1.fsdp_modules(old))),
        "roots": (units[0] is new, FSDP1.fsdp_modules(old, root_only=True) == [old], old.check_is_root()),
    }


def test_apply_units_and_the_root(pool: WorkerPool) -> None:
    for found in pool.run(2, _modules):
        assert found["applied"]
        assert found["changed"]
        assert found["units"] == (LAYERS + 1, LAYERS + 1)
        assert found["roots"] == (True, True, True)


def _forward() -> dict[str, Any]:
    reference, model = plain(), fsdp2(plain())
    expected = reference(input_ids=own()).logits
    found: dict[str, Any] = {"called": torch.allclose(model(input_ids=own()).logits, expected, atol=1e-6)}
    reshard_all(model)
    try:
        model.model.embed_tokens(own())
        found["refused"] = False
    except RuntimeError as error:
        found["refused"] = "DTensor" in str(error)
    found["embedded"] = []
    type(model).embed = lambda self, tokens: self.model.embed_tokens(tokens)
    register_fsdp_forward_method(model, "embed")
    found["method"] = torch.equal(model.embed(own()), reference.model.embed_tokens(own()))
    return found


def test_forward_and_other_methods(pool: WorkerPool) -> None:
    for found in pool.run(2, _forward):
        assert found["called"]
        assert found["refused"], "outside a hook a shard is all there is"
        assert found["method"]
