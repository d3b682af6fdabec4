"""Adapters: what is gathered, reduced and stored, and their first values. How they train is `test_parity`."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2kit.checkpoint.state import fill_weights
from fsdp2kit.config.schema import LoraConfig as LoraSection
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.model.nf4 import dequantize, level_pairs
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.parity.engine import Sharded, whole
from fsdp2kit.parity.reference import load_plain
from fsdp2kit.torch_compat import SHARDS_INTEGERS, TorchDispatchMode, tree_leaves
from fsdp2kit.weights.adapters import base_name
from fsdp2kit.weights.modules import base_tensors
from tests.parallel.helpers.ledger import compiled_step
from tests.parallel.helpers.ledger import one_step as step_with_ledger
from tests.parallel.helpers.steps import BYTES, one_step
from tests.support.cases import Case
from tests.support.models import (
    ADAMW_8BIT,
    full,
    make_batches,
    needs_integers,
    nf4_rounded,
    tiny_model,
)
from tests.support.workers import WorkerPool


def share_in_bytes(name: str, parameter: Tensor, *, ranks: int, quantize: str) -> int:
    """What a rank holds of a parameter, padded, and sends of it to each other one: its rows in bfloat16, or NF4.

    In NF4 a block of 64 elements has 36 bytes, and the rows that are kept together fill whole blocks.
    """
    if quantize != "nf4" or ".layers." not in name or not name.endswith("base_layer.weight"):
        return math.ceil(len(parameter) / ranks) * parameter[0].numel() * BYTES["bfloat16"]
    rows, width = parameter.shape
    together = 64 // math.gcd(64, width)
    return math.ceil(math.ceil(rows / together) / ranks) * together * width // 64 * 36


@pytest.mark.full
@pytest.mark.parametrize(
    ("adapter", "reduced", "quantize"),
    [("lora", 2, "none"), ("saved", 4, "none"), full("lora", 2, "nf4", marks=[needs_integers])],
)
def test_everything_is_gathered_and_adapters_alone_are_reduced(
    adapter: str, reduced: int, quantize: str, pool: WorkerPool, models: Path
) -> None:
    """A step of two micro-batches on four ranks: gathers in bfloat16 or NF4, reductions in float32."""
    gathered: dict[str, int] = {}
    trained: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(
            load_plain(models / "llama3"), models / f"llama3-{adapter}", is_trainable=True
        )
    for name, parameter in model.get_base_model().named_parameters():
        unit = next((part for part in ("layers.0", "layers.1", "embed_tokens", "lm_head") if part in name), "norm")
        size = math.ceil(len(parameter) / 4) * parameter[0].numel()  # a rank's rows, padded
        gathered[unit] = gathered.get(unit, 0) + share_in_bytes(name, parameter, ranks=4, quantize=quantize)
        if parameter.requires_grad:
            trained[unit] = trained.get(unit, 0) + size
    assert len(trained) == reduced
    once = ("embed_tokens", "lm_head")  # not in backward: a look-up needs no weight, and the head was not freed
    gathers = 2 * sum(size * (1 if unit in once else 2) for unit, size in gathered.items())
    case = Case("llama3", 4, 1, 1, (("param_dtype", "bfloat16"),), adapter=adapter, quantize=quantize)
    for traffic in pool.run(4, one_step, models, case):
        assert traffic.calls["reduce_scatter"] == 2 * reduced
        assert traffic.sent["reduce_scatter"] == 2 * 3 * sum(trained.values()) * BYTES["float32"]
        # A head that is trained, FSDP2 may gather once more at the end of backward, ahead of the next forward.
        again = traffic.sent["all_gather"] - 3 * gathers
        assert again in ({0} if adapter == "lora" else {0, 3 * gathered["lm_head"]})


class Peak(TorchDispatchMode):
    """Follows the memory that operators allocate while it is open, and the most that was alive at once.

    What they are given does not count: a file may be mapped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for leaf in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_meta):
            storage = leaf.untyped_storage()
            if storage._cdata not in given:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        alive = sum(size for reference, size in self._storages.values() if not reference.expired())
        self.peak = max(self.peak, alive)
        return result


def loaded(folder: Path, case: Case) -> tuple[int, int]:
    """Bytes of this rank's shards, and the most that filling them took beside them."""
    config = case.config(folder, steps=1, rows=4)
    mesh = build_mesh(config.mesh, config.fsdp, world=distributed.start())
    model = build_model(config.model, lora=config.lora)
    plan = plan_parallel(model, config, mesh.sizes, mesh.device.type)
    parallelize_model(model, plan, mesh=mesh)
    with Peak() as memory:
        fill_weights(config.model, model, seed=0)
    return sum(distributed.local_part(parameter).nbytes for parameter in model.parameters()), memory.peak


@pytest.mark.full
@needs_integers
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_rank_ever_holds_the_model_in_full_precision(ranks: int, pool: WorkerPool, tmp_path: Path) -> None:
    """Beside the shards there is never more than a rank's rows of one tensor, as it is quantised."""
    deep = {**tiny_model("llama3").config.to_dict(), "num_hidden_layers": 8, "hidden_size": 144, "head_dim": 16}
    model = LlamaForCausalLM(LlamaConfig(**deep))
    model.save_pretrained(str(tmp_path / "llama3"))
    config = LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, config).save_pretrained(str(tmp_path / "llama3-dora"))
    bfloat16 = (("param_dtype", "bfloat16"),)
    found = pool.run(ranks, loaded, tmp_path, Case("llama3", ranks, 1, 1, bfloat16, adapter="dora", quantize="nf4"))
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    stored = sum(share_in_bytes(name, p, ranks=1, quantize="nf4") for name, p in frozen.items())
    assert sum(shards for shards, _ in found) == stored + trained
    largest = max(p.numel() for p in frozen.values())
    for _, peak in found:
        assert peak < 24 * largest / ranks < sum(p.nbytes for p in frozen.values()) / 4


@pytest.mark.full
@pytest.mark.parametrize(("quantize", "packed"), [("none", ""), full("nf4", ", torch.uint8", marks=[needs_integers])])
def test_the_frozen_model_is_stored_in_the_dtype_it_computes_in(
    quantize: str, packed: str, pool: WorkerPool, models: Path
) -> None:
    fsdp = (("param_dtype", "bfloat16"), ("class_dtypes", {"LlamaRMSNorm": "float32"}))
    case = Case("llama3", 2, 1, 1, fsdp, adapter="dora", quantize=quantize)
    assert pool.run(2, step_with_ledger, models, case) == ["ok", "ok"]
    for wrong, found in (("frozen", f"torch.bfloat16, torch.float32{packed}"), ("storage", "torch.float32")):
        said = pool.run(2, step_with_ledger, models, case, **{wrong: "float16"})[0]
        assert said == f"dtype ledger: {wrong} should be float16, but {found} was found"


def first_values(folder: Path, case: Case, section: LoraSection, seed: int) -> dict[str, Tensor]:
    """What is trained, whole, as a run begins with it."""
    config = case.config(folder, steps=1, rows=4)
    run = config.run.model_copy(update={"seed": seed})
    sharded = Sharded(config.model_copy(update={"lora": section, "run": run}), world=distributed.start())
    return {name: whole(p.detach()).clone() for name, p in sharded.model.named_parameters() if p.requires_grad}


@pytest.mark.full
def test_first_values_are_pefts_by_seed_and_name_on_every_mesh(pool: WorkerPool, models: Path) -> None:
    section = LoraSection(rank=5, dora=True, modules_to_save=["lm_head"])
    alone = pool.run(1, first_values, models, Case("llama3"), section, 0)[0]
    fsdp = (("param_dtype", "bfloat16"), ("strategy", "hybrid_shard"))
    other = pool.run(4, first_values, models, Case("llama3", 2, 2, 1, fsdp, dp_replicate=2), section, 0)[3]
    another_seed = pool.run(1, first_values, models, Case("llama3"), section, 1)[0]
    weights = dict(tiny_model("llama3").named_parameters())
    firsts = [value[0, 0].item() for name, value in alone.items() if "lora_A" in name]
    assert len(set(firsts)) == len(firsts) == 14, "no two layers begin alike"
    for name, value in alone.items():
        assert value.dtype == torch.float32
        if "lora_A" in name:
            assert torch.equal(value, other[name])
            assert not torch.equal(value, another_seed[name])
            bound = value.shape[1] ** -0.5  # kaiming_uniform_ with a = √5
            assert 0.9 * bound < value.abs().max() <= bound
        elif "lora_B" in name:
            assert not value.any()
            assert not other[name].any()
        elif "magnitude" in name:
            weight = weights[name.replace("lora_magnitude_vector.default.", "")].detach()
            assert torch.equal(value, torch.linalg.norm(weight, dim=1))
            assert torch.equal(other[name], torch.linalg.norm(weight.bfloat16().float(), dim=1)), "of what is stored"
        else:
            assert torch.equal(value, weights[base_name(name) or ""])
            assert torch.equal(value, other[name]), "from the files, not from the model in bfloat16"


def stored(folder: Path, case: Case, weights: str) -> dict[str, Tensor]:
    """Whole weights by the names of the plain model's: those in 4 bits, or all where none is."""
    config = case.config(folder, steps=1, rows=4)
    section = config.model.model_copy(update={"weights": weights})
    model = Sharded(config.model_copy(update={"model": section}), world=distributed.start()).model
    found = {name: tensor for name, (tensor, *_) in base_tensors(model).items()}
    if case.quantize == "nf4":
        found = {name: tensor for name, tensor in found.items() if tensor.dtype == torch.uint8}
    return {name: whole(values.detach()).clone() for name, values in found.items()}


@pytest.mark.full
@needs_integers
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_what_is_stored_in_4_bits_does_not_depend_on_the_mesh(weights: str, pool: WorkerPool, models: Path) -> None:
    case = Case("llama3", adapter="lora", quantize="nf4")
    alone = pool.run(1, stored, models, case, weights)[0]
    spread = replace(case, dp=2, cp=2, fsdp=(("strategy", "hybrid_shard"),), dp_replicate=2)
    other = pool.run(4, stored, models, spread, weights)[1]
    third = pool.run(4, stored, models, replace(case, dp=4), weights)[3]
    plain = pool.run(1, stored, models, replace(case, quantize="none"), weights)[0]
    assert len(alone) == 14
    for name, packed in alone.items():
        assert torch.equal(packed, other[name])
        assert torch.equal(packed, third[name])
        left = dequantize(packed, level_pairs(), plain[name].shape[1], torch.float32)[: len(plain[name])]
        assert torch.allclose(left, nf4_rounded(plain[name]), rtol=1e-6, atol=0)


def losses_with(folder: Path, case: Case, options: dict[str, dict[str, Any]]) -> list[float]:
    config = case.config(folder, steps=5, rows=4)
    values = config.model_dump() | {name: config.model_dump()[name] | keys for name, keys in options.items()}
    return Sharded(type(config).model_validate(values), world=distributed.start()).curves(make_batches(1) * 5).loss


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", ADAMW_8BIT, "adamw_bf16"])
def test_every_optimizer_trains_adapters(optimizer: str, pool: WorkerPool, models: Path) -> None:
    options = {"optimizer": {"name": optimizer}}
    alone = pool.run(1, losses_with, models, Case("smollm2", adapter="lora"), options)[0]
    sharded = pool.run(2, losses_with, models, Case("smollm2", 2, adapter="lora"), options)[0]
    assert alone[-1] < alone[0]
    assert sharded == pytest.approx(alone, rel=1e-5 if optimizer == "muon" else 1e-3)


@pytest.mark.full
def test_layers_with_adapters_are_one_graph(pool: WorkerPool, models: Path) -> None:
    """One for the first layer, whose inputs come from a frozen embedding, and one for the others."""
    for quantize in ("none", "nf4") if SHARDS_INTEGERS else ("none",):
        case = Case("llama3", checkpointing=True, adapter="lora", quantize=quantize)
        (found,) = pool.run(1, compiled_step, models, case, is_watched=True)
        assert (found["graphs"], found["breaks"]) == (2, {})
