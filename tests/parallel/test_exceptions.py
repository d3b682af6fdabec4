"""What is not sharded, trained or computed like the rest: frozen, ignored, and of another dtype."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdp2kit.job import distributed
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import errors, plain_loop
from tests.support.cases import Case, run_cases
from tests.support.models import LENGTH, beyond, full, make_batches
from tests.support.traffic import count_traffic
from tests.support.workers import WorkerPool

HALF = ("*.layers.0.*", "*.mlp.down_proj.*")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("llama3", 2, 2, frozen=HALF), marks=pytest.mark.slow),
        pytest.param(Case("llama3", 2, 1, 2, frozen=("model.*",)), marks=pytest.mark.slow),
        Case("smollm2", 2, 1, frozen=("lm_head.*",), checkpointing="selective"),
        full(
            Case(
                "smollm2", 4, 1, fsdp=(("strategy", "hybrid_shard"),), dp_replicate=2, frozen=HALF, checkpointing=True
            )
        ),
        full(Case("llama3", 2, 2, fsdp=(("ignored_modules", ["model.layers.0", "*.down_proj"]),), frozen=HALF)),
        full(Case("llama3", 2, 1, fsdp=(("ignored_modules", ["model.embed_tokens"]),), frozen=("*.embed_tokens.*",))),
    ],
    ids=str,
)
def test_frozen_parameters_stay_and_the_rest_trains_as_in_the_plain_loop(
    case: Case, pool: WorkerPool, models: Path
) -> None:
    def freeze(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if any(fnmatch(name, pattern) for pattern in case.frozen):
                parameter.requires_grad_(False)

    plain, other = (
        plain_loop(models / case.kind, make_batches(), micro_batch_size=n, lr=1e-3, prepare=freeze) for n in (4, 1)
    )
    found = pool.run(case.world, run_cases, models, [case])[0][0]
    assert not beyond(errors(found, plain), errors(other, plain))


def reduced_bytes(folder: Path, case: Case) -> tuple[int, int, list[str]]:
    """Bytes scattered in one backward, elements of this rank's trained shards, and names of what is kept whole."""
    sharded = Sharded(case.config(folder, steps=1, rows=2), world=distributed.start())
    model = sharded.model
    loss = model.loss_sum(**sharded.inputs(make_batches(1)[0][:1].as_batch()))
    with count_traffic() as traffic:
        loss.backward()
    trained = sum(p.to_local().numel() for p in model.parameters() if p.requires_grad)
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    return traffic.sent["reduce_scatter"], trained, whole


def test_only_gradients_that_exist_are_reduced(pool: WorkerPool, models: Path) -> None:
    """A frozen parameter costs no reduction although it shares its layer's unit."""
    case = Case("llama3", 2, frozen=HALF, fsdp=(("ignored_modules", ["*.layers.0.mlp"]),))
    for sent, trained, whole in pool.run(2, reduced_bytes, models, case):
        assert sent == trained * 4, "of two halves one is sent, in float32"
        assert whole == [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]


def logits_of(folder: Path, case: Case) -> np.ndarray:
    sharded = Sharded(case.config(folder, steps=1, rows=1), world=distributed.start())
    return sharded.forward(make_batches(1)[0][:1], document=range(LENGTH))[0]


def _in_float32(norm: nn.Module) -> None:
    """What `class_dtypes` promises, with plain hooks: float32 within, bfloat16 without."""

    def cast_in(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(each.float() for each in inputs)

    def cast_out(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.bfloat16()

    norm.float()
    norm.register_forward_pre_hook(cast_in)
    norm.register_forward_hook(cast_out)


def test_a_class_computes_in_its_own_dtype(pool: WorkerPool, models: Path) -> None:
    rows = make_batches(1)[0][:1]
    plain: Any = AutoModelForCausalLM.from_pretrained(models / "llama3", dtype=torch.bfloat16)
    folder = models / "norms"
    exact: Any = AutoModelForCausalLM.from_pretrained(models / "llama3", dtype=torch.float32)
    for name, parameter in exact.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.003)  # which bfloat16 cannot hold, or there would be nothing to see
    exact.save_pretrained(folder / "llama3")
    with torch.no_grad():
        for module in plain.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                _in_float32(module)
                module.weight.fill_(1.003)
        inputs = {"input_ids": rows.input_ids, "position_ids": rows.position_ids, "use_cache": False}
        expected = plain(**inputs).logits[0].float().numpy()
    fsdp: tuple = (("param_dtype", "bfloat16"),)
    everywhere = Case("llama3", 2, fsdp=fsdp)
    excepted = Case("llama3", 2, fsdp=(*fsdp, ("class_dtypes", {"LlamaRMSNorm": "float32"})))
    found = pool.run(2, logits_of, folder, excepted)[0]
    other = pool.run(2, logits_of, folder, everywhere)[0]
    error, difference = (float(np.abs(each - expected).max()) for each in (found, other))
    assert error < difference / 4, (error, difference)
