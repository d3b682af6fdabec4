"""Loops of one's own: README's and ``help(fsdp2kit)``'s, as printed, give one process's numbers on any ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import fsdp2kit as fk
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import start
from tests.docs.helpers import EXAMPLES, lines_of
from tests.support.models import demo_model_dir
from tests.support.runs import DEMO
from tests.support.workers import ROOT, WorkerPool

FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
[README_LOOP] = [
    code for code in FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8")) if "build_mean_loss" in code
]
MESHES = {
    "dp": ["mesh.cp=1"],
    "cp": ["mesh.cp=2"],
    "ring": ["mesh.cp=2", "context_parallel.method=ring"],
    "hybrid": ["fsdp.strategy=hybrid_shard", "mesh.dp_replicate=2", "mesh.dp_shard=1"],
    "replicas": ["fsdp.strategy=no_shard"],
}


def run_script(code: str, folder: Path, overrides: list[str]) -> str:
    """What a script prints on this rank."""
    folder.mkdir(parents=True, exist_ok=True)
    said, former = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(said), mock.patch.object(sys, "argv", ["loop.py", *overrides]):
            exec(compile(code, "loop.py", "exec", dont_inherit=True), {"__name__": "__main__"})
    finally:
        os.chdir(former)
    return said.getvalue()


def initial_model(script: str, folder: Path) -> Path:
    """The model that README's loop begins with, exported: the script up to where it trains."""
    before = script.split("mean_loss =")[0]
    run_script(f'{before}\nfk.export_model(model, "begin")', folder, [])
    return folder / "begin"


def plain_lines(model: torch.nn.Module, steps: int) -> str:
    """README's loop with plain transformers: each document alone, the loss by torch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    documents = (torch.arange(128) % 10).reshape(8, 16)
    lines = []
    for step in range(steps):
        logits = model(input_ids=documents, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), documents[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lines.append(f"step {step}: loss {loss.item():.6f}, gradient norm {norm.item():.6f}\n")
    return "".join(lines)


def figures(text: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"\d+\.\d+", text)]


def test_readmes_loop_trains_as_plain_transformers_on_any_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(initial_model(README_LOOP, tmp_path / "begin"), dtype=torch.float32)
    expected = figures(plain_lines(model, steps=3))
    assert len(expected) == 6
    assert figures(run_script(README_LOOP, tmp_path / "alone", [])) == pytest.approx(expected, rel=1e-5)
    for name, overrides in MESHES.items():
        said = pool.run(2, run_script, README_LOOP, tmp_path / name, overrides)
        assert figures(said[0]) == pytest.approx(expected, rel=1e-5), name
        assert said[1] == "", name
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "runs/loop/hf")
        for key, value in model.state_dict().items():
            torch.testing.assert_close(exported.state_dict()[key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mesh", ["{}", pytest.param('{"cp": 2}', marks=pytest.mark.full)])
def test_the_examples_of_help_give_the_same_on_two_ranks(mesh: str, pool: WorkerPool, tmp_path: Path) -> None:
    script = "\n".join(EXAMPLES)
    places = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": str(demo_model_dir(tmp_path / "tiny", dtype=torch.float32)),
        '"seq_len": 1024': '"seq_len": 64',
        '"wandb":': f'"fsdp": {{"param_dtype": "float32"}}, "mesh": {mesh}, "wandb":',
    }
    for there, here in places.items():
        assert there in script
        script = script.replace(there, here)
    curves = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        shutil.copy(DEMO / "heldout.jsonl", folder / "chats.jsonl")
        on_ranks = script if ranks == 2 else script.replace(f'"mesh": {mesh}', '"mesh": {}')
        pool.run(ranks, run_script, on_ranks, folder, [])
        for name in ("first", "parts"):
            records = lines_of(folder / "runs" / name)
            curves[ranks, name] = [value for record in records for value in (record["loss"], record["grad_norm"])]
    for curve in curves.values():
        assert len(curve) > 2
        assert curve == pytest.approx(curves[1, "first"], rel=1e-5)


def uneven_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Three rows of 30 tokens, which neither two ranks nor four divide; the second row is two documents."""
    ids = (torch.arange(90).reshape(3, 30) * 7) % 60
    positions = torch.arange(30).expand(3, 30).clone()
    positions[1, 11:] = torch.arange(19)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    labels[1, 10] = -100
    labels[2, :9] = -100
    return ids, labels, positions


def gradients_of_uneven_rows(folder: Path, overrides: list[str], calls: int) -> dict[str, Tensor]:
    model, mean_loss = build(folder, overrides)
    rows = uneven_rows()
    items = int((rows[1] != -100).sum())
    total = 0.0
    for call in range(calls):  # an accumulated batch, a row a call, or all rows in one
        part = rows if calls == 1 else tuple(tensor[call : call + 1] for tensor in rows)
        loss = mean_loss(*part, num_items=items)
        loss.backward()
        total += loss.item()
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return {**found, "loss": torch.tensor(total)}


def build(folder: Path, overrides: list[str]):  # type: ignore[no-untyped-def]
    settings = {"recipe": "pretrain", "model": {"path": str(folder)}, "fsdp": {"param_dtype": "float32"}}
    config = fk.load_config(settings, *overrides)
    mesh = fk.build_mesh(config.mesh, config.fsdp, world=start())
    model = fk.build_model(config.model)
    plan = fk.plan_parallel(model, config, mesh.sizes, mesh.device.type)
    fk.parallelize_model(model, plan, mesh=mesh)
    fk.load_pretrained(model)
    return model, fk.build_mean_loss(model, plan=plan, mesh=mesh)


@pytest.mark.parametrize(
    ("ranks", "overrides", "calls"),
    [
        (2, ["mesh.cp=2", "context_parallel.method=ring"], 1),
        (2, [], 3),
        pytest.param(4, ["mesh.cp=2"], 1, marks=pytest.mark.full),
        pytest.param(4, ["mesh.cp=2", "context_parallel.method=allgather"], 3, marks=pytest.mark.full),
    ],
)
def test_rows_that_ranks_do_not_divide(
    ranks: int, overrides: list[str], calls: int, pool: WorkerPool, tmp_path: Path
) -> None:
    folder = demo_model_dir(tmp_path / "tiny", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids, labels, _ = uneven_rows()
    documents = [
        (ids[0], labels[0]),
        (ids[1, :11], labels[1, :11]),
        (ids[1, 11:], labels[1, 11:]),
        (ids[2], labels[2]),
    ]
    total = torch.zeros(())
    for tokens, targets in documents:
        logits = plain(input_ids=tokens[None], use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    loss = total / int((labels != -100).sum())
    loss.backward()
    found = pool.run(ranks, gradients_of_uneven_rows, folder, overrides, calls)
    for of_rank in found:
        assert of_rank["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
        for name, parameter in plain.named_parameters():
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(of_rank[name], parameter.grad, rtol=0, atol=1e-5 * scale)


def test_a_batch_that_is_none_is_refused(tmp_path: Path) -> None:
    _, mean_loss = build(demo_model_dir(tmp_path / "tiny", dtype=torch.float32), [])
    ids, labels, positions = uneven_rows()
    wrong = [
        ((ids, labels[:2], positions), "labels"),
        ((ids, labels, positions.float()), "position_ids"),
        ((ids[0], labels[0], positions[0]), "input_ids"),
        ((ids[:0], labels[:0], positions[:0]), "input_ids"),
        ((ids, labels.fill_(-100), positions), "labels"),
        ((ids, labels, positions + 1), "position_ids: a row begins at position 1"),
    ]
    for arguments, where in wrong:
        with pytest.raises(UserError, match=where):
            mean_loss(*arguments)


def test_adapters_get_their_first_values_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    """peft's: B is zero, so the model begins as it was."""
    settings = {
        "recipe": "pretrain",
        "model": {"path": str(demo_model_dir(tmp_path / "tiny", dtype=torch.float32))},
        "fsdp": {"param_dtype": "float32"},
        "lora": {"rank": 4},
    }
    config = fk.load_config(settings)
    mesh = fk.build_mesh(config.mesh, config.fsdp, world=start())
    losses = []
    for fill in (fk.load_pretrained, lambda model: fk.initialize(model, seed=0)):
        model = fk.build_model(config.model, lora=config.lora)
        plan = fk.plan_parallel(model, config, mesh.sizes, mesh.device.type)
        fk.parallelize_model(model, plan, mesh=mesh)
        fill(model)
        adapted = {name: tensor.full_tensor() for name, tensor in model.named_parameters() if "lora_" in name}
        assert adapted
        for name, tensor in adapted.items():
            assert tensor.any() == ("lora_A" in name), name
            assert tensor.abs().max() < 1, name
        losses.append(fk.build_mean_loss(model, plan=plan, mesh=mesh)(*uneven_rows()).item())
    plain = build(tmp_path / "tiny", [])[1](*uneven_rows()).item()
    assert losses[0] == pytest.approx(plain, rel=1e-6)
