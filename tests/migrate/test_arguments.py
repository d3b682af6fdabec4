"""What the arguments of FSDP1 did, `[fsdp]` does: the same gradients from the same communication in the same order.

The order is that of `Schedule`: ``gg3rg2`` is two gathers, layer 3's backward, a reduce-scatter, a gather, layer 2's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from fsdp2kit.model.build import freeze
from tests.migrate.helpers import (
    LAYERS,
    difference,
    fsdp1,
    fsdp2,
    gradients,
    loss,
    own,
    plain,
    quiet,
    reference_gradients,
    schedule,
)
from tests.support.models import full
from tests.support.workers import WorkerPool

UNITS = LAYERS + 1
TIGHT = 1e-5


def _strategy(name: str, replicate: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"sharding_strategy": ShardingStrategy[name]}
    if "HYBRID" in name:
        arguments["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with quiet():
        old = fsdp1(plain(), **arguments)
        new = fsdp2(plain(), strategy=name.removeprefix("_").lower(), replicate=replicate)
        found: dict[str, Any] = {"old": schedule(old), "new": schedule(new)}
        expected = reference_gradients()
        for key, model in (("old", old), ("new", new)):
            model.zero_grad()
            loss(model, own()).backward()
            found[f"{key} error"] = difference(gradients(model), expected)
    optimizer = torch.optim.AdamW(new.parameters())
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    found["share"] = sum(m.to_local().numel() for m in moments) / sum(m.numel() for m in moments)
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "replicate", "share", "sent"),
    [
        ("FULL_SHARD", 2, 1, 1 / 2, {"g": UNITS + LAYERS, "r": UNITS}),
        full("SHARD_GRAD_OP", 2, 1, 1 / 2, {"g": UNITS, "r": UNITS}),
        # Every rank holds all of the optimizer's state: this is DDP, and no ZeRO.
        full("NO_SHARD", 2, 2, 1, {"a": UNITS}),
        full("HYBRID_SHARD", 4, 2, 1 / 2, {"g": UNITS + LAYERS, "r": UNITS, "a": UNITS}),
        full("_HYBRID_SHARD_ZERO2", 4, 2, 1 / 2, {"g": UNITS, "r": UNITS, "a": UNITS}),
    ],
)
def test_a_strategy_sends_the_same_in_the_same_order(
    name: str, ranks: int, replicate: int, share: float, sent: dict[str, int], pool: WorkerPool
) -> None:
    for found in pool.run(ranks, _strategy, name, replicate):
        assert found["new"] == found["old"]
        events = "".join(found["new"])
        assert {letter: events.count(letter) for letter in "gra" if letter in events} == sent
        assert found["old error"] < TIGHT
        assert found["new error"] < TIGHT
        assert found["share"] == pytest.approx(share, rel=0.01)


def _prefetch() -> dict[str, tuple[str, str]]:
    found = {f"{depth} ahead": schedule(fsdp2(plain(), backward_prefetch=depth)) for depth in range(4)}
    found["forward 1"] = schedule(fsdp2(plain(), forward_prefetch=1))
    for kind in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        found[kind.name if kind else "None"] = schedule(fsdp1(plain(), backward_prefetch=kind))
    found["forward True"] = schedule(fsdp1(plain(), forward_prefetch=True))
    for limit in (True, False):
        found[f"limit {limit}"] = schedule(fsdp1(plain(), limit_all_gathers=limit))
    return found


def _whole_units(backward: str) -> list[int]:
    """Units that are gathered and not yet used up when each layer's backward begins."""
    gathered, used, found = 0, 0, []
    for event in backward:
        gathered += event == "g"
        if event.isdigit():
            found.append(gathered - used)
            used += 1
    return found


@pytest.mark.full
def test_prefetch_is_the_same_schedule_and_its_depth_is_the_window(pool: WorkerPool) -> None:
    for found in pool.run(2, _prefetch):
        assert found["1 ahead"] == found["BACKWARD_PRE"]
        assert found["0 ahead"] == found["None"]
        assert found["forward 1"][0] == found["forward True"][0] != found["1 ahead"][0]
        # BACKWARD_POST gathers after a layer's computation, like none at all, but before its gradients are reduced.
        assert found["BACKWARD_POST"][1] == "g3gr2gr1gr0rr"
        assert found["0 ahead"][1] == "g3rg2rg1rg0rr"
        assert _whole_units(found["BACKWARD_POST"][1]) == _whole_units(found["0 ahead"][1]) == [1] * LAYERS
        for depth in range(1, 4):
            assert _whole_units(found[f"{depth} ahead"][1]) == [min(depth + 1, left) for left in (4, 3, 2, 1)]
        # The limiter held the host back, not the order; without one, the depth is the window.
        assert found["limit True"] == found["limit False"] == found["BACKWARD_PRE"]


def _dtypes_inside(model: Any) -> dict[str, torch.dtype]:
    """Dtypes that layer 1 sees: its input, its weight while it computes, the model's buffer afterwards."""
    seen: dict[str, torch.dtype] = {}

    def look(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.update(input=inputs[0].dtype, weight=module.weight.dtype)

    inner = [module for name, module in model.named_modules() if name.endswith("self_attn.q_proj")][1]
    hook = inner.register_forward_pre_hook(look)
    loss(model, own()).backward()
    hook.remove()
    buffers = {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers()}
    return {**seen, "buffer": buffers["inv_freq"]}


def _precision() -> tuple[dict[str, torch.dtype], dict[str, torch.dtype], set[torch.dtype], set[torch.dtype]]:
    half = torch.bfloat16
    old = fsdp1(plain(), mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half))
    new = fsdp2(plain(), param_dtype="bfloat16", reduce_dtype="bfloat16")
    seen = _dtypes_inside(old), _dtypes_inside(new)
    stored = {parameter.dtype for parameter in new.parameters()}
    return *seen, stored, {parameter.grad.dtype for parameter in new.parameters()}


def test_precision_is_that_of_fsdp1_but_for_buffers(pool: WorkerPool) -> None:
    for old, new, stored, grads in pool.run(2, _precision):
        assert old == {"input": torch.bfloat16, "weight": torch.bfloat16, "buffer": torch.bfloat16}
        assert new == {"input": torch.bfloat16, "weight": torch.bfloat16, "buffer": torch.float32}
        assert stored == grads == {torch.float32}, "keep_low_precision_grads has nothing to keep"


def _inputs_are_cast() -> list[torch.dtype]:
    """What a layer that is called by itself with float32 hidden states computes with."""
    model = fsdp2(plain(), param_dtype="bfloat16")
    seen: list[torch.dtype] = []
    layer = model.model.layers[1]
    layer.input_layernorm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    model(own())  # the root starts first
    hidden = torch.randn(1, 3, 32)
    rotary = model.model.rotary_emb(hidden, torch.arange(3)[None])
    layer(hidden, position_embeddings=rotary)
    return seen


def test_every_units_inputs_are_cast_to_param_dtype(pool: WorkerPool) -> None:
    assert pool.run(2, _inputs_are_cast) == [[torch.bfloat16] * 2] * 2


def _names_and_frozen() -> dict[str, Any]:
    reference, model = plain(), plain()
    for each in (reference, model):
        freeze(each, ["*.mlp.*", "model.norm.*"])
    loss(reference, torch.cat([own(), own()])).backward()
    before = model
    fsdp2(model)
    loss(model, torch.cat([own(), own()])).backward()
    trained = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for gradient in expected.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return {
        "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()}
        == {name: tuple(p.shape) for name, p in reference.named_parameters()},
        "buffers": [name for name, _ in model.named_buffers()] == [name for name, _ in reference.named_buffers()],
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "no wrapper": before is model and isinstance(model, LlamaForCausalLM) and isinstance(model, FSDPModule),
        "error": difference(trained, expected),
        "frozen": sum(p.grad is None for p in model.parameters()),
    }


def test_parameters_keep_their_names_and_may_be_frozen_within_a_unit(pool: WorkerPool) -> None:
    for found in pool.run(2, _names_and_frozen):
        assert found["shapes"]
        assert found["buffers"]
        assert found["sharded"]
        assert found["no wrapper"]
        assert found["error"] < TIGHT
        assert found["frozen"] == 3 * LAYERS + 1
