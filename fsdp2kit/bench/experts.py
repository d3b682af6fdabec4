"""Experts: training with `mesh.ep` beside training without it, and our operator beside transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fsdp2kit.bench.harness import Side, Task, run_sides, task_rows
from fsdp2kit.bench.sides import OurSide, bench_config, compare
from fsdp2kit.job.distributed import World
from fsdp2kit.parallel.expert_parallel.experts import ExpertKind, register_kind, routed_experts


def bench_experts(
    world: World,
    *,
    experts: int = 32,
    visited: int = 4,
    hidden: int = 256,
    width: int = 512,
    layers: int = 4,
    tokens: int = 512,
    rounds: int = 20,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Iterator[dict[str, Any]]:
    """Several ranks: steps with ep = ranks beside ep = 1, in turns. One rank: a layer beside transformers' forwards.

    Args:
        experts: of a layer.
        visited: experts that a token visits.
        hidden: size of a hidden state.
        width: of an expert.
        layers: of the model; one rank measures one.
        tokens: of each rank's row.
        rounds: that are timed.
        dtype: in which it computes.
    """
    sizes = {"num_experts": experts, "num_experts_per_tok": visited, "hidden_size": hidden}
    sizes["moe_intermediate_size"] = width
    if world.size == 1:
        kind = getattr(torch, dtype)
        yield {"rows": _measure_layer(sizes, tokens, kind, rounds=rounds, world=world)}
        return
    shape = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": hidden // 4}
    model = {"model_type": "qwen3_moe", "vocab_size": 1024, **sizes, **shape, "tie_word_embeddings": True}

    def build(name: str) -> Side:
        config = bench_config(
            {
                "model": {"weights": "random", "config": model},
                "mesh": {"ep": 1 if name == "ep = 1" else world.size},
                "fsdp": {"param_dtype": dtype},
                "data": {"format": "synthetic", "seq_len": tokens},
                "train": {"global_batch_size": world.size, "steps": 1000},
            }
        )
        return OurSide(config, world=world)

    ours = f"ep = {world.size}"
    pairs = {"experts": (ours, "ep = 1", 1e-4 if dtype == "float32" else 5e-2)}
    yield from compare(pairs, build, rounds=rounds, warmup=3, world=world)


def _measure_layer(
    sizes: dict[str, int], tokens: int, dtype: torch.dtype, *, rounds: int, world: World
) -> list[dict[str, Any]]:
    """Forward and backward of a layer's experts, of tokens spread evenly at random."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    module: Any = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    module.to(world.device, dtype)
    shape = tokens, sizes["num_experts_per_tok"]
    states = torch.randn(tokens, sizes["hidden_size"], device=world.device, dtype=dtype).requires_grad_()
    index = torch.rand(tokens, sizes["num_experts"], device=world.device).topk(shape[1]).indices
    weights = torch.rand(shape, device=world.device, dtype=dtype).requires_grad_()
    slope = torch.randn_like(states)
    kept = ExpertKind("bench", module._apply_gate, module.is_transposed, module.has_bias)
    register_kind(kept)
    group = dist.group.WORLD
    assert group is not None

    def ours() -> Tensor:
        parameters = [module.gate_up_proj, module.down_proj]
        out = routed_experts(states, index, weights, parameters, sizes["num_experts"], kept.name, group.group_name)
        return out[0]

    def of_transformers(name: str) -> Tensor:
        config._experts_implementation = name
        return module(states, index, weights)

    forwards: dict[str, Callable[[], Tensor]] = {"fsdp2kit": ours}
    forwards |= {f"transformers, {name}": partial(of_transformers, name) for name in ("grouped_mm", "eager")}
    inputs = [states, weights, *module.parameters()]
    found = {name: torch.autograd.grad(forward(), inputs, slope) for name, forward in forwards.items()}
    sides = {name: Task(partial(_differentiate, forward, inputs, slope)) for name, forward in forwards.items()}
    rows = task_rows(run_sides(sides, rounds=rounds, warmup=3, world=world))
    for row in rows:
        pairs = zip(found[row["name"]], found["fsdp2kit"], strict=True)
        row["gradients_differ_by"] = max(float((one - our).norm() / our.norm()) for one, our in pairs)
    return rows


def _differentiate(forward: Callable[[], Tensor], inputs: list[Tensor], slope: Tensor) -> None:
    torch.autograd.grad(forward(), inputs, slope)
