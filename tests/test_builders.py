"""Each builder works alone: outside the runner, without torchrun, most without a process group."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedModel

from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.checkpoint.export_model import export_model
from fsdp2kit.checkpoint.from_hf import compare_logits, hf_to_dcp
from fsdp2kit.checkpoint.hf import dcp_to_hf, ensure_export
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.state import load_weights
from fsdp2kit.config.schema import (
    ActivationCheckpointingConfig,
    AdamWConfig,
    ChatDataConfig,
    FSDPConfig,
    MeshConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from fsdp2kit.config.sections.lr_schedule import PlainScheduleConfig
from fsdp2kit.data.documents import build_documents
from fsdp2kit.data.loader import Share, build_loader
from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.job.progress import Progress
from fsdp2kit.job.run_directory import lock_run_dir, write_record
from fsdp2kit.job.start import start_job
from fsdp2kit.migrate.state_dicts import torch_to_dcp
from fsdp2kit.model.assets import find_hf_dir
from fsdp2kit.model.build import build_model, decoder_layers, materialize
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.overlap.report import build_report
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.attention import apply_attention
from fsdp2kit.parallel.context_parallel.layout import AttentionPath
from fsdp2kit.parallel.fsdp import apply_fsdp
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.train.metrics import build_metrics
from fsdp2kit.weights.initialize import initialize
from fsdp2kit.weights.load import load_pretrained
from fsdp2kit.weights.stored import weights_digest
from tests.support.workers import WorkerPool

DEMO = Path(__file__).resolve().parents[1] / "toml" / "demo"
TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.arange(24).reshape(2, 12)


def real_model() -> Any:
    """A tiny model on the CPU, without FSDP."""
    model = build_model(ModelConfig(config=TINY, weights="random"))
    materialize(model, device=torch.device("cpu"))
    initialize(model, seed=0)
    return model


def plain_copy(model: PreTrainedModel) -> LlamaForCausalLM:
    """The same weights in a model that transformers built."""
    plain = LlamaForCausalLM(copy.deepcopy(model.config)).float()
    plain.load_state_dict(model.state_dict())
    return plain


def test_build_model_and_attach_loss() -> None:
    model = real_model()
    attach_loss(model)
    logits = plain_copy(model)(TOKENS).logits
    expected = F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten(), reduction="sum")
    torch.testing.assert_close(model.loss_sum(TOKENS, TOKENS), expected)


def test_apply_activation_checkpointing_changes_no_gradient() -> None:
    model = real_model()
    plain = plain_copy(model)
    section = ActivationCheckpointingConfig(mode="full", every=2)
    apply_activation_checkpointing(section, decoder_layers(model), device_type="cpu")
    for each in (model, plain):
        each(TOKENS).logits.square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_tokenizer_documents_and_loader() -> None:
    tokenizer = build_tokenizer(ModelConfig(tokenizer=str(DEMO / "tokenizer")))
    section = ChatDataConfig(path=str(DEMO / "heldout.jsonl"), seq_len=64)
    documents = build_documents(section, tokenizer=tokenizer)
    loader = build_loader([documents], share=Share(64, 4, 2), pack=True, shuffle=True, seed=0)
    assert [tuple(batch.input_ids.shape) for batch in loader.batch(0)] == [(2, 64)] * 2


def test_optimizer_and_schedule() -> None:
    model = real_model()
    optimizer = build_optimizer(AdamWConfig(lr=1e-2), model)
    schedule = build_lr_schedule(PlainScheduleConfig(name="constant"), optimizer, total_steps=5)
    before = model(TOKENS).logits.square().mean()
    before.backward()
    optimizer.step()
    schedule.step()
    assert model(TOKENS).logits.square().mean() < before


def test_checkpoints_with_a_plain_model(tmp_path: Path) -> None:
    model = real_model()
    optimizer = build_optimizer(AdamWConfig(), model)
    config = TrainingConfig(recipe="mine", run=RunConfig(dir=str(tmp_path)))
    checkpoints = Checkpoints(config, model, optimizer, identity={}, write_assets=lambda folder: None)
    path = checkpoints.save(Progress(step=3))
    kept = copy.deepcopy(model.state_dict())
    initialize(model, seed=1)
    assert checkpoints.restore(path).step == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name


def test_path_arguments_take_text(tmp_path: Path) -> None:
    folder, dcp, back = (str(tmp_path / name) for name in ("model", "dcp", "back"))
    plain = plain_copy(real_model())
    plain.save_pretrained(folder)
    torch.save(plain.state_dict(), tmp_path / "state.pt")
    hf_to_dcp(folder, dcp)
    torch_to_dcp(str(tmp_path / "state.pt"), str(tmp_path / "again"), config_dir=folder)
    assert ": whole: " in verify(dcp)
    dcp_to_hf(dcp, back, config_dir=folder)
    assert not ensure_export(dcp, out=back, dtype="float32")
    assert "the same logits" in compare_logits(dcp, back)
    for fill in (lambda model: load_pretrained(model, folder), lambda model: load_weights(dcp, model)):
        model = real_model()
        fill(model)
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    export_model(model, str(tmp_path / "exported"))
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "exported")(TOKENS).logits, plain(TOKENS).logits)
    assert find_hf_dir(Path(folder), key="mine", with_weights=True) == Path(folder)
    assert weights_digest(folder) == weights_digest(Path(folder))
    with lock_run_dir(str(tmp_path / "run")):
        write_record(str(tmp_path / "run"), config_text="", environment={})
    with pytest.raises(UserError, match="no trace"):
        build_report(str(tmp_path / "run"))


def run_job(run_dir: Path) -> tuple[list[str], float, float]:
    """`start_job`, `plan_parallel` and `build_metrics` by hand: files, and FLOPs a device, found and expected."""
    values = {"model": {"config": TINY, "weights": "random"}, "run": {"dir": str(run_dir)}, "train": {"steps": 2}}
    config = TrainingConfig.model_validate({"recipe": "mine", "wandb": {"mode": "disabled"}, **values})
    with start_job(config) as job:
        model = build_model(config.model)
        plan = plan_parallel(model, config, job.mesh.sizes, job.mesh.device.type)
        job.open_run_dir(dtypes=plan.ledger)
        metrics = build_metrics(config, job=job, plan=plan, progress=Progress(), total_steps=2)
        for step in (1, 2):
            metrics.log({"step": step, "loss": 1.0})
        metrics.throughput.add(1000, 10, 0, 0.0)
        record = metrics.throughput.record()
    flops = record["tflops_per_device"] * record["step_seconds"] * 1e12
    return sorted(path.name for path in run_dir.iterdir()), flops, 6000 * plan.flops.parameters / job.world.size


@pytest.mark.parametrize("size", [1, 2])
def test_a_job_its_plan_and_its_metrics(size: int, pool: WorkerPool, tmp_path: Path) -> None:
    for names, found, expected in pool.run(size, run_job, tmp_path / "run"):
        assert {".lock", "config.toml", "environment.json", "metrics.jsonl"} <= set(names)
        assert found == pytest.approx(expected)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def shard_and_compare() -> dict[str, bool]:
    """`build_mesh`, `apply_attention` and `apply_fsdp`, each called by hand on an ordinary real model."""
    world = distributed.start()
    section = FSDPConfig(param_dtype="float32")
    mesh = build_mesh(MeshConfig(cp=world.size), section, world=world)
    model = real_model()
    plain = plain_copy(model)
    apply_attention(model, AttentionPath("ulysses", "sdpa"), group=mesh.cp_group)
    apply_fsdp(section, model, mesh=mesh.shard)
    part = TOKENS.shape[1] // world.size
    local = slice(mesh.cp_rank * part, (mesh.cp_rank + 1) * part)
    positions = torch.arange(TOKENS.shape[1])[None, local]
    logits = model(TOKENS[:, local], position_ids=positions, use_cache=False).logits
    return {"logits": torch.allclose(logits, plain(TOKENS).logits[:, local], atol=1e-6)}


@pytest.mark.parametrize("size", [1, 2])
def test_mesh_context_parallel_and_fsdp(size: int, pool: WorkerPool) -> None:
    assert pool.run(size, shard_and_compare) == [{"logits": True}] * size


def test_agree_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    distributed.agree()
    with pytest.raises(ValueError, match="mine"):
        distributed.agree(ValueError("mine"))
