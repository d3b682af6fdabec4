"""Strategies and activation checkpointing do what they are for; that they leave the numbers alone is the gate's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.config.schema import ActivationCheckpointingConfig, FSDPConfig
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.fsdp import plan_units
from tests.support.cases import Case, build
from tests.support.models import full, make_batches, tiny_model
from tests.support.traffic import count_traffic
from tests.support.workers import WorkerPool

# Units of the untied model: embedding, two layers, head, and the root with the final norm.
UNITS = 5


@pytest.mark.parametrize(
    ("strategy", "reshard", "gathers", "share"),
    [
        # backward gathers anew what was freed and is read: the layers, not the embedding, the head or the root
        ("full_shard", None, UNITS + 2, 4),
        full("full_shard", False, UNITS, 4),
        full("shard_grad_op", None, UNITS, 4),
        full("shard_grad_op", True, UNITS + 2, 4),
        full("hybrid_shard", None, UNITS + 2, 2),
        ("hybrid_shard_zero2", None, UNITS, 2),
        full("no_shard", None, 0, 1),
    ],
)
def test_what_a_strategy_keeps_and_gathers(
    strategy: str, reshard: bool | None, gathers: int, share: int, pool: WorkerPool, models: Path
) -> None:
    fsdp = (("strategy", strategy), *([] if reshard is None else [("reshard_after_forward", reshard)]))
    case = Case("llama3", 4, 1, fsdp=fsdp, dp_replicate=2 if "hybrid" in strategy else "auto")
    for units, found, fraction in pool.run(4, _gathers_and_share, models, case):
        assert units == ["", "lm_head", "model.embed_tokens", "model.layers.0", "model.layers.1"]
        assert found == gathers
        assert fraction == pytest.approx(1 / share, rel=0.02)


def _gathers_and_share(folder: Path, case: Case) -> tuple[list[str], int, float]:
    """Names of the units, all-gathers in a forward and backward, and the share of the parameters kept here."""
    sharded = build(case.config(folder, steps=1, rows=4))
    model, mesh, to_device = sharded.model, sharded.mesh, sharded.inputs
    batch = make_batches(1)[0][mesh.dp_rank : mesh.dp_rank + 1].as_batch()
    with count_traffic() as traffic:
        model.loss_sum(**to_device(batch)).backward()
    parameters = list(model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters), "backward frees what forward kept"
    local, whole = (sum(sizes) for sizes in zip(*((p.to_local().numel(), p.numel()) for p in parameters), strict=True))
    units = sorted(name for name, module in model.named_modules() if isinstance(module, FSDPModule))
    dist.barrier()
    return units, traffic.calls.get("all_gather", 0), local / whole


def test_a_tied_embedding_stays_in_the_roots_unit(pool: WorkerPool, models: Path) -> None:
    for units, _, _ in pool.run(2, _gathers_and_share, models, Case("smollm2", 2, 1)):
        assert units == ["", "model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(("every", "runs"), [(1, [2, 2, 2]), (2, [2, 1, 2]), (3, [2, 1, 1]), (None, [1, 1, 1])])
def test_checkpointed_layers_run_twice(every: int | None, runs: list[int]) -> None:
    config = tiny_model("smollm2").config
    config.num_hidden_layers = 3
    model = type(tiny_model("smollm2"))(config)
    names = list(dict(model.named_parameters()))
    counts = [0, 0, 0]

    def count(number: int) -> Any:
        def hook(*_: Any) -> None:
            counts[number] += 1

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.act_fn.register_forward_hook(count(number))
    if every is not None:
        section = ActivationCheckpointingConfig(mode="full", every=every)
        apply_activation_checkpointing(section, list(model.model.layers), device_type="cpu")
    model(input_ids=torch.arange(6)[None], use_cache=False).logits.sum().backward()
    assert counts == runs
    assert list(dict(model.named_parameters())) == names


def test_precision_is_the_sections() -> None:
    model = tiny_model("llama3")
    section = FSDPConfig(param_dtype="bfloat16", output_dtype="float32", class_dtypes={"LlamaRMSNorm": "float32"})
    found = {unit.name: (unit.param_dtype, unit.output_dtype) for unit in plan_units(section, model)}
    assert found[""] == found["lm_head"] == ("bfloat16", None), "the loss stays as exact as it was computed"
    assert found["model.layers.0"] == ("bfloat16", "float32")
    assert found["model.norm"] == ("float32", "float32")
    found = {unit.name: unit.output_dtype for unit in plan_units(FSDPConfig(class_dtypes=section.class_dtypes), model)}
    assert (found["model.layers.0"], found["model.norm"]) == (None, "bfloat16")


def test_what_is_frozen_around_a_tied_embedding_is_no_unit() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("modernbert-decoder", vocab_size=128, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" in name)
    names = {unit.name for unit in plan_units(FSDPConfig(), model)}
    assert "model.embeddings.norm" in names
    assert not names & {"model.embeddings", "model.embeddings.tok_embeddings", "decoder"}
