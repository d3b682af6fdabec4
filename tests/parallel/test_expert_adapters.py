"""Adapters of mixtures of experts: on experts, and on other layers beside partitioned experts."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from fsdp2kit.checkpoint.merge import merge_to_hf
from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import ModelConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.parity.reference import Curves, errors, load_plain, plain_loop, worst_relative
from tests.support.cases import Case, run_cases
from tests.support.models import (
    add_adapter,
    beyond,
    demo_model_dir,
    full,
    make_batches,
    needs_integers,
    plain_batches,
    slow,
    tiny_model_dir,
    write_adapter,
)
from tests.support.runs import losses, resume, runner, write_run
from tests.support.workers import WorkerPool
from tools import plan

NO_MORE = ("train.steps=1", "checkpoint.export_hf=never")
HYBRID = (("strategy", "hybrid_shard"),)
DEFAULT = [
    Case("qwen3_moe", 2, 1, 1, adapter="experts", checkpointing="full"),
]
FULL = [
    Case("qwen3_moe", 2, 2, 1, ep=4, adapter="lora", checkpointing="selective"),
    Case("qwen3_moe", 4, 1, 1, HYBRID, dp_replicate=2, ep=2, adapter="dora", checkpointing="full"),
    Case("qwen3_moe", 2, 1, 1, ep=2, adapter="saved"),
]
QUANTIZED = [
    Case("qwen3_moe", 2, 2, 1, HYBRID, dp_replicate=2, adapter="experts", quantize="nf4", checkpointing="selective"),
    Case("qwen3_moe", 1, 2, 2, adapter="lora", quantize="nf4", pack=False),
    Case("mixtral", 4, 1, 1, adapter="experts", quantize="nf4", checkpointing="full"),
]
SLOW = [
    Case("qwen3_moe", 2, 2, 1, HYBRID, dp_replicate=2, adapter="experts", checkpointing="selective"),
    Case("qwen3_moe", 1, 3, 1, (("unit", "size"), ("min_params", 2_000)), adapter="experts"),
    Case("mixtral", 4, 1, 1, (("reduce_every_micro_batch", False),), adapter="experts"),
    Case("qwen3_moe", 2, 1, 2, ep=2, adapter="lora"),
    Case("qwen3_moe", 1, 2, 1, adapter="experts"),
    Case("mixtral", 2, 1, 2, adapter="experts", pack=False),
    Case("qwen3_moe", 2, 1, 1, ep=2, adapter="layer", checkpointing="full"),
]


def write_expert_adapter(folder: Path, kind: str) -> None:
    """Write an adapter of two layers of attention and of experts, saved by peft, to ``folder / kind-experts``."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        experts = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"], target_parameters=experts)
        model = get_peft_model(load_plain(folder / kind), config)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(str(folder / f"{kind}-experts"))


QLORA = [pytest.param(case, marks=[pytest.mark.full, needs_integers]) for case in QUANTIZED]


@pytest.mark.parametrize("case", [*DEFAULT, *QLORA, *map(full, FULL), *map(slow, SLOW)], ids=str)
def test_training_equals_pefts(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    """Gradients of every factor, and five steps with clipping, against transformers and peft in one process."""
    tiny_model_dir(case.kind, tmp_path)
    if case.adapter == "experts":
        write_expert_adapter(tmp_path, case.kind)
    else:
        write_adapter(tmp_path, case.kind, case.adapter or "")
    trained: list[str] = []

    def prepare(model: Any) -> None:
        add_adapter(model, tmp_path / f"{case.kind}-{case.adapter}", quantize=case.quantize)
        trained.extend(name for name, parameter in model.named_parameters() if parameter.requires_grad)

    batches = make_batches() if case.pack else plain_batches()
    loop = partial(plain_loop, tmp_path / case.kind, batches, lr=1e-3, prepare=prepare)
    exact, other = (loop(micro_batch_size=size) for size in (4, 1))
    exact, other = (
        Curves({name: one.gradients[name] for name in trained}, one.loss, one.grad_norm, one.lr)
        for one in (exact, other)
    )
    found = pool.run(case.world, run_cases, tmp_path, [case])[0][0]
    assert found.gradients.keys() == exact.gradients.keys()
    assert not beyond(errors(found, exact), errors(other, exact))
    assert min(np.abs(gradient).max() for gradient in found.gradients.values()) > 0


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(demo_model_dir(tmp_path_factory.mktemp("moe"), kind="qwen3_moe"), lr=1e-2)


QLORA_RUN = pytest.param("adamw", "nf4", marks=[pytest.mark.full, needs_integers])


@pytest.mark.parametrize(
    ("optimizer", "quantize"), [slow("adamw", "none"), QLORA_RUN, slow("adamw_bf16", "none"), slow("muon", "none")]
)
def test_a_run_resumes_on_other_meshes_and_is_exported(
    optimizer: str, quantize: str, pool: WorkerPool, toml: Path, tmp_path: Path
) -> None:
    """The adapter as peft loads it, and the merged model, have the logits of the last checkpoint."""
    run, options = runner(pool, toml), ["lora.rank=4", "lora.target_modules=['q_proj', 'experts']"]
    options += [f"optimizer.name={optimizer}", f"lora.quantize={quantize}"]
    straight = tmp_path / "straight"
    run(straight, 2, *options)
    assert losses(straight)[-1] < losses(straight)[0] - 0.1
    for size, mesh in ((4, ["mesh.cp=2"]), (1, [])):
        resumed = resume(run, straight / "checkpoints" / "step-000003", tmp_path / f"{size}", size, *options, *mesh)
        limit = 1e-5 if optimizer == "adamw" else 1e-3
        assert worst_relative([line["loss"] for line in resumed], losses(straight)[3:]) < limit

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = PeftModel.from_pretrained(load_plain(toml.parent), str(straight / "hf")).eval()
    merge_to_hf(straight / "checkpoints" / "step-000006", tmp_path / "merged", dtype="float32")
    ids = torch.arange(48)[None] * 7 % 1024
    with torch.no_grad():
        merged, adapted, plain = (
            model(input_ids=ids, use_cache=False).logits
            for model in (load_plain(tmp_path / "merged").eval(), peft, load_plain(toml.parent).eval())
        )
    assert (adapted - plain).abs().max() > 0.1
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)
    # It says again what was trained: the first loss of a run that goes on from it.
    [after] = run(tmp_path / "more", 2, f"model.adapter={straight / 'hf'}", *NO_MORE)
    [full_model] = run(tmp_path / "full", 1, f"model.path={tmp_path / 'merged'}", *NO_MORE)
    assert after["loss"] == pytest.approx(full_model["loss"], rel=1e-5)


@pytest.mark.full
def test_adapters_beside_partitioned_experts_resume_on_any_ep(pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    run, straight = runner(pool, toml), tmp_path / "straight"
    run(straight, 4, "lora.rank=4", "mesh.ep=2")
    for size, ep in ((4, 4), (2, 1)):
        checkpoint = straight / "checkpoints" / "step-000003"
        resumed = resume(run, checkpoint, tmp_path / f"{size}", size, "lora.rank=4", f"mesh.ep={ep}")
        assert worst_relative([line["loss"] for line in resumed], losses(straight)[3:]) < 1e-5
    assert losses(straight)[-1] < losses(straight)[0] - 0.1


@pytest.mark.full
def test_they_are_planned(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The planner traces their computation without values."""
    overrides = ["lora.rank=4", "lora.target_modules=['q_proj', 'experts']", "fsdp.param_dtype=bfloat16"]
    assert plan.main([str(toml), "--world-size", "2", *overrides]) == 0
    assert "reduce_scatter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mesh": {"ep": 2}}, r"^mesh.ep with adapters on experts: is not supported; leave the experts out"),
        ({"compile": {"enabled": True}}, r"^compile.enabled: true with adapters on experts in one tensor"),
        (
            {"lora": {"quantize": "nf4", "target_modules": ["q_proj"]}, "mesh": {"ep": 2}},
            r'^mesh.ep with lora.quantize = "nf4": is not supported; leave lora.quantize out, or use mesh.ep = 1',
        ),
        pytest.param(
            {"lora": {"quantize": "nf4", "target_modules": ["q_proj"]}, "compile": {"enabled": True}},
            r"^compile.enabled: true with experts in 4 bits",
            marks=needs_integers,
        ),
    ],
    ids=str,
)
def test_what_was_not_tried_with_adapters_on_experts_is_refused(options: dict[str, Any], says: str) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    section = ModelConfig(config={"vocab_size": 128, "model_type": "qwen3_moe", **sizes}, weights="random")
    lora = {"rank": 2, "target_modules": ["experts"], **options.pop("lora", {})}
    config = TrainingConfig.model_validate({"recipe": "x", "model": section, "lora": lora, **options})
    model = build_model(section, lora=config.lora)
    with pytest.raises(UserError, match=says):
        plan_parallel(model, config, MeshSizes(1, 2, 1, config.mesh.ep))
