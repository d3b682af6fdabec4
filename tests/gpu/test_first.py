"""The first piece of a loan: one short run of every path, as a user would start it. Tiny, two steps each.

``TRY_ON_CPU=1 python -m pytest -m gpu tests/gpu/test_first.py`` runs it without a device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp2kit.errors import RunFailure
from fsdp2kit.job import distributed
from fsdp2kit.run import load
from fsdp2kit.torch_compat import SHARDS_INTEGERS
from tests.support.models import demo_model_dir
from tools.benchmarks.harness import missing_packages

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
ON_CUDA = torch.cuda.is_available()
TOMLS = ROOT / "toml"
EXPERTS = ["num_experts=8", "num_experts_per_tok=2", "moe_intermediate_size=64"]
MIXTURE = ["model.config.model_type=qwen3_moe", *(f"model.config.{each}" for each in EXPERTS)]
LAYERS = ['layer_types=["linear_attention", "full_attention"]', "num_hidden_layers=2"]
HYBRID = ["model.config.model_type=qwen3_5_text", *(f"model.config.{each}" for each in LAYERS)]
SMALL = ["train.steps=2", "train.global_batch_size=2", "data.seq_len=256", "run.timeout_minutes=2"]

# By worth: what most runs take comes first, what takes long to compile last. Overrides, and packages that they need.
PATHS: dict[str, tuple[list[str], list[str]]] = {
    "packed documents in bfloat16": ([], []),
    "float32": (["fsdp.param_dtype=float32"], []),
    "transformers' attention": (["model.attention=sdpa"], []),
    "a sliding window": (["model.config.model_type=mistral", "model.config.sliding_window=64"], []),
    "attention sinks": (["model.config.model_type=granite_swa", "model.config.sliding_window=64"], []),
    "a layer that carries a state": (HYBRID, []),
    "a mixture": (MIXTURE, []),
    "a mixture balanced by a loss": (
        [*MIXTURE, "moe.balance=aux", "moe.aux_weight=0.01", "activation_checkpointing.mode=full"],
        [],
    ),
    "full recomputation": (["activation_checkpointing.mode=full"], []),
    "selective recomputation": (["activation_checkpointing.mode=selective"], []),
    "layers' inputs on the host": (
        ["activation_checkpointing.mode=full", "activation_checkpointing.offload=true"],
        [],
    ),
    "moments on the host": (["fsdp.offload=optimizer"], []),
    "parameters on the host": (["fsdp.offload=params"], []),
    "bfloat16 shards and moments": (["optimizer.name=adamw_bf16", "fsdp.storage_dtype=bfloat16"], []),
    "Muon": (["optimizer.name=muon"], []),
    "gradients kept whole": (["fsdp.strategy=shard_grad_op"], []),
    "gradients reduced each time": (["fsdp.reduce_every_micro_batch=true"], []),
    "evaluation": (["eval.every=1", "eval.steps=1", "eval.split=test"], []),
    "traces": (["profile.enabled=true", "profile.start_step=2", "profile.steps=1", "profile.memory=true"], []),
    "saves in the foreground": (["checkpoint.async_save=false", "checkpoint.every=1"], []),
    "adapters": (["lora.rank=4", "checkpoint.export_hf=never"], ["peft"]),
    "adapters on a model in 4 bits": (["lora.rank=4", "lora.quantize=nf4", "checkpoint.export_hf=never"], ["peft"]),
    "adapters on experts": (
        [*MIXTURE, "lora.rank=4", 'lora.target_modules=["q_proj", "experts"]', "checkpoint.export_hf=never"],
        ["peft"],
    ),
    "8-bit moments": (["optimizer.name=adamw_8bit"], ["torchao"]),
    "float8": (["float8.recipe=rowwise"], ["torchao"]),
    "Liger's layers": (["model.liger=true"], ["liger_kernel"]),
    "deterministic": (["run.deterministic=true"], []),
    "compiled": (["compile.enabled=true"], []),
    "compiled, selective recomputation": (["compile.enabled=true", "activation_checkpointing.mode=selective"], []),
    "compiled, float8": (["compile.enabled=true", "float8.recipe=rowwise"], ["torchao"]),
}


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """One process group for all, as each would start it."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            environment.delenv(name, raising=False)
        environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts
        yield
        distributed.stop()
        torch.use_deterministic_algorithms(False)


def train(folder: Path, *overrides: str, toml: Path = TOMLS / "pretrain_synthetic.toml") -> list[dict[str, float]]:
    """The records of a run of ``toml``, by default pretraining on random tokens."""
    torch.use_deterministic_algorithms(False)  # what an earlier run asked for
    recipe, config = load(str(toml), [*SMALL, f"run.dir={folder}", *overrides])
    recipe.main(config)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def obstacle(name: str) -> str | None:
    """Why a path cannot be tried here."""
    if missing := missing_packages(*PATHS[name][1]):
        return f"{missing[0]} is not installed"
    if "lora.quantize=nf4" in PATHS[name][0] and not SHARDS_INTEGERS:
        return "torch 2.11 shards no weights in 4 bits"
    if not ON_CUDA and name.startswith(("compiled", "Liger")):
        return "for a device"
    if name == "compiled, float8" or name == "float8":
        return "no float8 matmuls" if ON_CUDA and torch.cuda.get_device_capability() < (8, 9) else None
    return None


@pytest.mark.parametrize("name", PATHS)
def test_runs(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    if reason := obstacle(name):
        pytest.skip(reason)
    records = train(tmp_path, *PATHS[name][0])

    record_property("loss", round(records[-1]["loss"], 4))
    assert [record["step"] for record in records] == [1, 2]
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)
    assert records[0]["loss"] == pytest.approx(math.log(4096), rel=0.05), "random weights on random tokens"
    assert (tmp_path / "trace").exists() == (name == "traces")
    assert any(tmp_path.glob("trace/memory-*.pickle")) == ON_CUDA or name != "traces"


@pytest.mark.parametrize("name", ["demo_cp2", "demo_moe", "grpo_demo"])
def test_demos_run(name: str, tmp_path: Path) -> None:
    records = train(tmp_path, "mesh.cp=1", "mesh.ep=1", "train.global_batch_size=64", toml=TOMLS / f"{name}.toml")

    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype.is_floating_point


@pytest.mark.parametrize("recipe", ["dpo", "distill"])
def test_recipes_with_a_second_model_run(recipe: str, tmp_path: Path) -> None:
    pairs = [{"prompt": f"Is {at} odd? ", "chosen": "Yes" if at % 2 else "No", "rejected": "?"} for at in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8")
    overrides = ["mesh.cp=1", "train.global_batch_size=8", "eval.every=0"]
    if recipe == "dpo":
        overrides.append(f"data.path={tmp_path}/pairs.jsonl")
    else:
        overrides.append(f"distill.teacher={demo_model_dir(tmp_path)}")
    text = (TOMLS / "demo_cp2.toml").read_text(encoding="utf-8").replace('"demo/', f'"{TOMLS}/demo/')
    toml = tmp_path / "x.toml"
    toml.write_text(text.replace('recipe = "sft"', f'recipe = "{recipe}"'), encoding="utf-8")

    records = train(tmp_path / "run", *overrides, toml=toml)

    assert [record["step"] for record in records] == [1, 2]
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)


@pytest.mark.parametrize("offload", ["none", "optimizer", "params"])
def test_a_run_goes_on_from_an_asynchronous_save_and_exports(offload: str, tmp_path: Path) -> None:
    every = ["checkpoint.async_save=true", "checkpoint.every=1", f"fsdp.offload={offload}"]
    straight = train(tmp_path / "straight", "train.steps=3", *every)
    train(tmp_path / "resumed", *every)

    resumed = train(tmp_path / "resumed", "train.steps=3", *every)

    assert [record["step"] for record in resumed] == [1, 2, 3]
    assert resumed[-1]["loss"] == pytest.approx(straight[-1]["loss"], rel=1e-2)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "resumed/hf")
    assert all(parameter.isfinite().all() for parameter in exported.parameters())


@pytest.mark.skipif(not ON_CUDA, reason="a CPU has no allocator with a limit")
def test_out_of_memory_is_explained(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 600 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(RunFailure) as failure:
            train(tmp_path, "data.seq_len=32768", "train.micro_batch_size=2")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert "out of memory" in str(failure.value)
    assert "activation_checkpointing.mode" in str(failure.value)
    assert (tmp_path / "trace/oom-00000.pickle").stat().st_size > 0
