"""The real recipe on a tiny model and the demo's conversations: resuming, starting from weights, exporting."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager
from transformers import AutoModelForCausalLM

from fsdp2kit.checkpoint import checkpoints
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.data.build import build_data
from fsdp2kit.errors import RunFailure
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.parity.reference import Rows, cross_entropy_sum, load_plain, plain_logits, worst_relative
from fsdp2kit.run import load
from tests.support.models import demo_model_dir, full, slow
from tests.support.runs import run_recipe, runner
from tests.support.workers import WorkerPool

DEMO = Path(__file__).parents[2] / "toml" / "demo"
VOCABULARY = 1024  # the demo tokenizer's
DP2 = ("train.micro_batch_size=1",)  # of a global batch of four: two micro-batches a rank
CP2 = ("mesh.cp=2", "train.micro_batch_size=2")

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model in bfloat16, with the demo's tokenizer."""
    return demo_model_dir(tmp_path_factory.mktemp("tied"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def toml(model_dir: Path) -> Path:
    path = model_dir / "run.toml"
    path.write_text(
        f"""
        recipe = "sft"
        run.seed = 1
        model.path = "{model_dir}"
        fsdp.param_dtype = "float32"
        data = {{ path = "{DEMO / "chat.jsonl"}", seq_len = 64 }}
        train = {{ steps = 10, global_batch_size = 4, max_grad_norm = 0.5 }}
        optimizer = {{ lr = 1e-3, weight_decay = 0.1 }}
        lr_schedule.warmup_steps = 2
        checkpoint = {{ every = 5, keep = 9, export_dtype = "float32" }}
        wandb.mode = "disabled"
        """,
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def run(pool: WorkerPool, toml: Path) -> Run:
    """Run the recipe into a directory on so many ranks and return that directory."""

    def run_into(directory: Path, size: int, *overrides: str) -> Path:
        runner(pool, toml)(directory, size, *overrides)
        return directory

    return run_into


@pytest.fixture(scope="module")
def straight(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ten steps without a break, by mesh; checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("straight")
    return {name: run(folder / name, 2, *mesh) for name, mesh in (("dp2", DP2), ("cp2", CP2))}


def _metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _numbers(directory: Path, *, after: int = 0) -> list[tuple[float, ...]]:
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_total", "input_tokens")
    return [tuple(line[key] for key in keys) for line in _metrics(directory) if line["step"] > after]


def _checkpoint(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"step-{step:06d}"


def _interrupted(source: Path, target: Path, *, step: int = 5) -> Path:
    """A run directory as it was just after ``step``, but with a line of a step that no checkpoint has."""
    shutil.copytree(_checkpoint(source, step), _checkpoint(target, step))
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    (target / "metrics.jsonl").write_text("".join(lines[: step + 1]))
    return target


@pytest.mark.parametrize(("name", "mesh"), [full("dp2", DP2), ("cp2", CP2)])
def test_resumed_on_the_same_mesh_every_digit_is_the_same(
    name: str, mesh: tuple[str, ...], run: Run, straight: dict[str, Path], tmp_path: Path
) -> None:
    resumed = run(_interrupted(straight[name], tmp_path / "resumed"), 2, *mesh)
    assert [line["step"] for line in _metrics(resumed)] == list(range(1, 11))
    assert _numbers(resumed) == _numbers(straight[name])
    ours, theirs = (load_file(directory / "hf" / "model.safetensors") for directory in (resumed, straight[name]))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_losses_move_at_all(straight: dict[str, Path]) -> None:
    """Without this, comparisons of curves would mean nothing."""
    losses = [line["loss"] for line in _metrics(straight["dp2"])]
    assert len(set(losses)) == 10
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize(
    ("name", "size", "mesh"),
    [
        full("dp2", 2, CP2),
        slow("cp2", 2, DP2),
        ("dp2", 1, ()),
        full("cp2", 4, ("mesh.cp=2", "fsdp.strategy=no_shard")),
    ],
)
def test_resumed_on_another_mesh_the_numbers_agree(
    name: str, size: int, mesh: tuple[str, ...], run: Run, straight: dict[str, Path], tmp_path: Path
) -> None:
    resumed = run(_interrupted(straight[name], tmp_path / "resumed"), size, *mesh)
    found, expected = _metrics(resumed)[5:], _metrics(straight[name])[5:]
    for key in ("loss", "grad_norm", "lr"):
        assert worst_relative([line[key] for line in found], [line[key] for line in expected]) < 1e-5, key
    assert [line["tokens_total"] for line in found] == [line["tokens_total"] for line in expected]


def _run_with_late_copies(toml: str, overrides: Sequence[str]) -> None:
    """Run with copies for asynchronous saves that begin when the next step's backward is long over."""
    with pytest.MonkeyPatch.context() as patch:
        stage = DefaultStager._stage
        patch.setattr(DefaultStager, "_stage", lambda *args, **kwargs: (time.sleep(0.5), stage(*args, **kwargs))[1])
        run_recipe(toml, overrides)


@pytest.mark.full
def test_asynchronous_saves_change_no_number(
    pool: WorkerPool, toml: Path, run: Run, straight: dict[str, Path], tmp_path: Path
) -> None:
    """The optimizer waits for the copy: otherwise a checkpoint would hold values of a later step."""
    directory = tmp_path / "run"
    extra = ("checkpoint.async_save=true", "checkpoint.every=1", "checkpoint.export_hf=every", *DP2)
    pool.run(2, _run_with_late_copies, str(toml), [f"run.dir='{directory}'", *extra])
    assert _numbers(directory) == _numbers(straight["dp2"])
    for step in (5, 10):
        for number in (0, 1):
            ours, theirs = (_checkpoint(one, step) / f"__{number}_0.distcp" for one in (directory, straight["dp2"]))
            assert ours.read_bytes() == theirs.read_bytes()
    ours, theirs = (load_file(one / "hf" / "model.safetensors") for one in (directory, straight["dp2"]))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    resumed = run(_interrupted(directory, tmp_path / "resumed"), 2, *extra)
    assert _numbers(resumed) == _numbers(straight["dp2"])


def _run_with_full_disk(toml: str, overrides: Sequence[str]) -> str:
    """What a run says whose second checkpoint finds the disk full, on rank 0 alone."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        original = checkpoints.write_manifest
        patch.setattr(checkpoints, "write_manifest", lambda *a: fail() if "000004" in str(a[0]) else original(*a))
        try:
            run_recipe(toml, overrides)
        except RunFailure as failure:
            return str(failure)
    return "it went on"


@pytest.mark.full
@pytest.mark.parametrize("is_async", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_failed_save_stops_the_run_with_its_cause(
    is_async: str, pool: WorkerPool, toml: Path, straight: dict[str, Path], run: Run, tmp_path: Path
) -> None:
    extra = (f"run.dir='{tmp_path / 'run'}'", f"checkpoint.async_save={is_async}", "checkpoint.every=2", *DP2)
    for message in pool.run(2, _run_with_full_disk, str(toml), extra):
        assert "step-000004: the checkpoint was not saved" in message
        assert "No space left on device" in message
    assert 4 <= len(_metrics(tmp_path / "run")) < 10
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert _numbers(run(tmp_path / "run", 2, *extra[1:])) == _numbers(straight["dp2"])


def test_a_run_may_be_resumed_with_other_settings_and_says_so(
    pool: WorkerPool, toml: Path, straight: dict[str, Path], tmp_path: Path
) -> None:
    changes = ("train.steps=7", "optimizer.lr=5e-4", "lr_schedule.name=constant", "train.log_every=1")
    resumed = _interrupted(straight["dp2"], tmp_path / "resumed")
    [said] = pool.run(1, run_recipe, str(toml), [f"run.dir='{resumed}'", *changes, "train.micro_batch_size=4"])
    said = " ".join(said.split())
    assert "resumed from step 5; changed since:" in said
    for change in (
        "train.steps 10 → 7",
        "optimizer.lr 0.001 → 0.0005",
        "lr_schedule.name cosine → constant",
        "train.micro_batch_size 1 → 4",
        "mesh.dp_shard 2 → 1",
        "world_size 2 → 1",
    ):
        assert change in said
    lines = _metrics(resumed)
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line["lr"] for line in lines[5:]] == [5e-4, 5e-4]
    # The sixth step's loss is of the weights after step 5, so the rate has no say in it yet.
    assert lines[5]["loss"] == pytest.approx(_metrics(straight["dp2"])[5]["loss"], rel=1e-6)
    assert lines[6]["loss"] != pytest.approx(_metrics(straight["dp2"])[6]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("run.seed=2", "run.seed"),
        ("data.seq_len=128", "data"),
        ("data.pack=false", "data.pack"),
        ("data.shuffle=false", "data.shuffle"),
        (f"data.path='{DEMO / 'heldout.jsonl'}'", "other data: data.path (chat.jsonl is gone, heldout.jsonl is new, "),
        ("model.config.rms_norm_eps=0.5", "model"),
        ("model.weights=random", "model.weights"),
        ("train.global_batch_size=8", "train.global_batch_size"),
        ("optimizer.name=adamw_bf16", "optimizer.name"),
    ],
)
def test_another_run_is_refused_naming_the_field(
    change: str, field: str, pool: WorkerPool, toml: Path, straight: dict[str, Path], tmp_path: Path
) -> None:
    directory = _interrupted(straight["dp2"], tmp_path / "resumed")
    [message] = pool.run(1, run_recipe, str(toml), [f"run.dir='{directory}'", change])
    assert f"was made with {field}" in message
    assert len(_metrics(directory)) == 6, "the metrics are left alone"


@pytest.mark.full
def test_weights_of_a_checkpoint_start_a_fresh_run(run: Run, straight: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, export = _checkpoint(straight["dp2"], 10), straight["dp2"] / "hf"
    steps = ("train.steps=3", "run.seed=4")
    ours = run(tmp_path / "dcp", 2, f"model.weights='{checkpoint}'", *steps, *CP2)
    theirs = run(tmp_path / "hf", 2, f"model.path='{export}'", *steps, *CP2)
    assert _numbers(ours) == _numbers(theirs)
    assert [line["step"] for line in _metrics(ours)] == [1, 2, 3]
    assert _metrics(ours)[0]["tokens_total"] == _metrics(ours)[0]["tokens"]


def test_an_export_is_the_checkpoint_cast(
    run: Run, model_dir: Path, straight: dict[str, Path], tmp_path: Path
) -> None:
    for name, directory in straight.items():
        dcp_to_torch_save(_checkpoint(directory, 10), tmp_path / f"{name}.pt")
        consolidated = torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"]
        dcp_to_hf(_checkpoint(directory, 10), tmp_path / name, dtype="bfloat16")
        for export, dtype in ((directory / "hf", torch.float32), (tmp_path / name, torch.bfloat16)):
            stored = load_file(export / "model.safetensors")
            assert stored.keys() == consolidated.keys()
            assert all(torch.equal(stored[key], consolidated[key].to(dtype)) for key in stored)
            model = AutoModelForCausalLM.from_pretrained(export)
            assert model.dtype == dtype
            assert model.lm_head.weight is model.model.embed_tokens.weight
            assert torch.equal(model.model.embed_tokens.weight, stored["model.embed_tokens.weight"])
    before = load_file(model_dir / "model.safetensors")
    assert not any(torch.equal(before[key], stored[key]) for key in before if before[key].ndim == 2), "it was trained"


@pytest.mark.full
def test_a_stale_export_is_made_again(run: Run, straight: dict[str, Path], tmp_path: Path) -> None:
    """A longer run that died between its last checkpoint and its export, and one that asks for another dtype."""
    directory = _interrupted(straight["dp2"], tmp_path / "run", step=10)
    shutil.copytree(_checkpoint(straight["dp2"], 5), _checkpoint(directory, 5))
    dcp_to_hf(_checkpoint(directory, 5), directory / "hf", dtype="float32")
    run(directory, 2, *DP2)
    ours, theirs = (load_file(folder / "hf" / "model.safetensors") for folder in (directory, straight["dp2"]))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    run(directory, 2, "checkpoint.export_dtype=bfloat16", *DP2)
    stored = load_file(directory / "hf" / "model.safetensors")
    assert all(torch.equal(stored[key], theirs[key].bfloat16()) for key in theirs)
    assert AutoModelForCausalLM.from_pretrained(directory / "hf").dtype == torch.bfloat16


def test_the_first_loss_is_that_of_plain_transformers(straight: dict[str, Path], model_dir: Path, toml: Path) -> None:
    _, config = load(str(toml), ["train.micro_batch_size=4"])
    data = build_data(config, tokenizer=build_tokenizer(config.model), vocab_size=VOCABULARY)
    [batch] = data.loader.batch(0)
    rows = Rows(batch.input_ids, batch.labels, batch.position_ids)
    with torch.no_grad():
        loss = cross_entropy_sum(plain_logits(load_plain(model_dir), rows), rows.labels).item() / rows.targets
    assert _metrics(straight["cp2"])[0]["loss"] == pytest.approx(loss, rel=1e-6)
    assert _metrics(straight["cp2"])[0]["tokens"] == rows.targets


def test_epochs(pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    chats = tmp_path / "few.jsonl"
    chats.write_text("".join((DEMO / "chat.jsonl").read_text().splitlines(keepends=True)[:10]))
    config = tmp_path / "epochs.toml"  # train.epochs cannot be given beside the steps of the other one
    config.write_text(toml.read_text().replace("steps = 10", "epochs = 2", 1))
    lines = runner(pool, config)(tmp_path / "run", 1, f"data.path='{chats}'", "data.pack=false")
    # Ten rows of one document each are three batches of four, twice over; no document is seen more than once an epoch.
    tokens = [line["tokens"] for line in lines]
    assert len(tokens) == 6
    assert sum(tokens[:3]) == sum(tokens[3:])
    assert tokens[:3] != tokens[3:], "shuffled anew"


@pytest.mark.full
def test_out_of_time_it_keeps_what_it_has(run: Run, tmp_path: Path) -> None:
    short = ("lr_schedule.warmup_steps=0", "checkpoint.every=0", *CP2)  # it may get no further than one step
    directory = run(tmp_path / "run", 2, "train.steps=1000000", "run.max_minutes=0.02", *short)
    done = len(_metrics(directory))
    assert done > 0
    assert [path.name for path in (directory / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    assert not (directory / "hf").exists(), "only the end of a run is exported"
    run(directory, 2, f"train.steps={done + 1}", *short)
    assert [line["step"] for line in _metrics(directory)] == list(range(1, done + 2))
    assert (directory / "hf" / "model.safetensors").is_file()
