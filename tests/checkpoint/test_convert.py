"""Distributed checkpoints to Hugging Face directories, against `save_pretrained` and `from_pretrained`."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fsdp2kit.checkpoint import export_directory, from_hf, hf
from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import plan_export
from fsdp2kit.checkpoint.from_hf import compare_logits, hf_to_dcp
from fsdp2kit.checkpoint.hf import dcp_to_hf, ensure_export, write_files
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.source import open_source
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.model.build import load_whole
from fsdp2kit.weights import safetensors_file, transfer
from fsdp2kit.weights.safetensors_file import file_size, write_safetensors
from fsdp2kit.weights.transfer import MappingReader
from tests.checkpoint import helpers
from tests.checkpoint.helpers import assert_equal, exported, tool


@pytest.fixture
def model() -> PreTrainedModel:
    return helpers.tiny_llama()


@pytest.fixture
def checkpoint(tmp_path: Path, model: PreTrainedModel) -> Path:
    return helpers.checkpoints_of(tmp_path / "run", model).save(helpers.progress_at(3))


def plain_dcp(state: dict, path: Path) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_an_export_is_the_model_cast(tmp_path: Path, checkpoint: Path, model: PreTrainedModel, dtype: str) -> None:
    out = tmp_path / "out"
    dcp_to_hf(checkpoint, out, dtype=dtype)
    cast = model.to(torch.float32 if dtype == "float32" else torch.bfloat16)  # the manifest says bfloat16
    cast.save_pretrained(tmp_path / "reference")
    assert_equal(exported(out), exported(tmp_path / "reference"))
    config = json.loads((out / "config.json").read_text())
    assert config == json.loads((tmp_path / "reference" / "config.json").read_text())
    files = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == {*files, ".fsdp2kit-export.json"}
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode

    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not any(info.values())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_equal(loaded.state_dict(), cast.state_dict())


def test_files_are_of_bounded_size_and_shared_between_ranks(
    tmp_path: Path, checkpoint: Path, model: PreTrainedModel
) -> None:
    directory = ExportDirectory(tmp_path / "out")
    with open_source(checkpoint, None) as source:
        plans = [plan_export(source, dtype="float32", max_shard_bytes=8000) for _ in range(2)]
        held = [{name: [str(file.forms), file.size] for name, file in plan.files.items()} for plan in plans]
        assert held[0] == held[1]
        plan = plans[0]
        directory.begin(plan)
        write_files(plan, directory.staging, rank=1, world_size=2)
        with pytest.raises(RunFailure, match=r"model-00001-of-\d+\.safetensors: was not written"):
            directory.publish(plan)
        assert not (tmp_path / "out").exists()
        write_files(plan, directory.staging, rank=0, world_size=2)
        directory.publish(plan)

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) >= 3
    assert all((tmp_path / "out" / file).stat().st_size < 8000 + 2000 for file in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(loaded.state_dict(), model.state_dict())


def tiny_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    return Qwen3MoeForCausalLM(config)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fused_experts_are_written_as_save_pretrained_writes_them(tmp_path: Path) -> None:
    model = tiny_moe()
    model.save_pretrained(tmp_path / "reference")
    checkpoint = plain_dcp(model.state_dict(), tmp_path / "dcp")
    dcp_to_hf(checkpoint, tmp_path / "out", config_dir=tmp_path / "reference", max_shard_bytes=10_000)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in exported(tmp_path / "out")
    assert_equal(exported(tmp_path / "out"), exported(tmp_path / "reference"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prefixed", [True, False])
def test_plain_checkpoints_are_exported_with_a_config(tmp_path: Path, model: PreTrainedModel, prefixed: bool) -> None:
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "README.md").write_text("the source model's card")
    state = model.state_dict()
    checkpoint = plain_dcp({"model": state, "epoch": 3} if prefixed else state, tmp_path / "dcp")
    with pytest.raises(UserError, match="--config HF_DIR"):
        dcp_to_hf(checkpoint, tmp_path / "out")
    dcp_to_hf(checkpoint, tmp_path / "out", config_dir=tmp_path / "hf")
    assert_equal(exported(tmp_path / "out"), exported(tmp_path / "hf"))
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    helpers.tiny_llama(hidden=8).config.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"embed_tokens\.weight: has shape \(97, 16\)"):
        dcp_to_hf(checkpoint, tmp_path / "out", config_dir=tmp_path / "other")
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        dcp_to_hf(checkpoint, tmp_path / "out", config_dir=tmp_path / "nothing")
    assert not (tmp_path / "out").exists()


def test_only_an_earlier_export_is_replaced(tmp_path: Path, checkpoint: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    dcp_to_hf(checkpoint, out, dtype="float32")
    dcp_to_hf(checkpoint, out, dtype="bfloat16", max_shard_bytes=4000)
    assert not (out / "model.safetensors").exists()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt, which no export of fsdp2kit wrote"):
        dcp_to_hf(checkpoint, out)
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_changed_since_is_not_replaced(
    tmp_path: Path, checkpoint: Path, model: PreTrainedModel, name: str
) -> None:
    """A model that was trained further there has the same names and sizes; a damaged file is no export."""
    out = tmp_path / "out"
    dcp_to_hf(checkpoint, out, dtype="float32")
    if name == "model.safetensors":
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        model.float().save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
    else:
        (out / name).write_text((out / name).read_text() + "\n")
    before = (out / name).read_bytes()
    for again in (partial(dcp_to_hf, checkpoint, out), partial(ensure_export, checkpoint, out=out, dtype="float32")):
        with pytest.raises(UserError, match=r"is not as fsdp2kit wrote it there; choose another directory, or move"):
            again()
    assert (out / name).read_bytes() == before
    moved = shutil.copytree(out, tmp_path / "moved")
    assert not ExportDirectory(moved).is_whole()


def test_an_export_may_be_moved(tmp_path: Path, checkpoint: Path) -> None:
    dcp_to_hf(checkpoint, tmp_path / "out", dtype="float32")
    moved = shutil.copytree(tmp_path / "out", tmp_path / "moved", copy_function=shutil.copyfile)
    assert not ensure_export(checkpoint, out=moved, dtype="float32")
    dcp_to_hf(checkpoint, moved, dtype="bfloat16")


@pytest.mark.parametrize("is_there", [True, False])
def test_an_export_goes_where_a_link_leads(tmp_path: Path, checkpoint: Path, is_there: bool) -> None:
    (tmp_path / "disk").mkdir()
    place, link = tmp_path / "disk" / "hf", tmp_path / "link"
    if is_there:
        place.mkdir()
    link.symlink_to(place)
    for dtype in ("float32", "bfloat16", "float32"):
        dcp_to_hf(checkpoint, link, dtype=dtype)
        assert link.is_symlink()
        assert {str(tensor.dtype) for tensor in exported(place).values()} == {f"torch.{dtype}"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link", "run"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["hf"]


def test_what_float16_does_not_hold_is_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] = 1e6
    path = helpers.checkpoints_of(tmp_path / "run", model).save(helpers.progress_at(3))
    with pytest.raises(UserError, match=r"model\.norm\.weight has values that float16 does not hold .*1e\+06"):
        dcp_to_hf(path, tmp_path / "out", dtype="float16")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]
    dcp_to_hf(path, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "x"])
def test_a_file_size_that_is_none_is_refused(
    tmp_path: Path, checkpoint: Path, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tool("dcp_to_hf").main([str(checkpoint), str(tmp_path / "out"), "--max-shard-gb", size])
    assert "--max-shard-gb" in capsys.readouterr().err


def test_an_export_is_made_again_only_where_it_is_not_of_this_checkpoint_and_dtype(
    tmp_path: Path, checkpoint: Path, model: PreTrainedModel
) -> None:
    out = tmp_path / "out"
    assert ensure_export(checkpoint, out=out, dtype="float32")
    assert not ensure_export(checkpoint, out=out, dtype="float32")
    assert ensure_export(checkpoint, out=out, dtype="bfloat16")
    assert {tensor.dtype for tensor in exported(out).values()} == {torch.bfloat16}
    (out / "tokenizer.json").unlink()
    assert ensure_export(checkpoint, out=out, dtype="bfloat16")

    with torch.no_grad():  # the same step, of another training
        model.lm_head.weight.add_(1)
    again = helpers.checkpoints_of(tmp_path / "run", model).save(helpers.progress_at(3))
    assert again == checkpoint
    assert ensure_export(checkpoint, out=out, dtype="float32")
    assert torch.equal(exported(out)["model.embed_tokens.weight"], model.lm_head.weight)
    (out / ".fsdp2kit-export.json").write_text('{"files": ["config.json"]}')  # as an older version wrote it
    with pytest.raises(UserError, match="which no export of fsdp2kit wrote"):
        ensure_export(checkpoint, out=out, dtype="float32")


def test_the_command_line(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert (
        tool("dcp_to_hf").main(
            [str(checkpoint), str(out), "--dtype", "float16", "--max-shard-gb", "0.00001", "--verify"]
        )
        == 0
    )
    assert {tensor.dtype for tensor in exported(out).values()} == {torch.float16}
    assert (out / "model.safetensors.index.json").exists()
    assert "gives the same logits" in capsys.readouterr().out
    assert tool("dcp_to_hf").main([str(tmp_path / "nothing"), str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["dcp_to_hf", "hf_to_dcp"])
def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, checkpoint: Path, model: PreTrainedModel, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "file").write_text("")
    source = checkpoint if name == "dcp_to_hf" else tmp_path / "hf"
    capsys.readouterr()  # transformers' progress bar
    for out in ("/proc/x", str(tmp_path / "file" / "x")):
        assert tool(name).main([str(source), out]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: out: {Path(out).parent} cannot be written (")
        assert error.count("\n") == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_a_hugging_face_directory_becomes_a_checkpoint_and_comes_back(
    tmp_path: Path, kind: str, model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"tied": lambda: model, "untied": lambda: helpers.tiny_llama(tied=False), "experts": tiny_moe}[kind]()
    model.bfloat16().save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    out = tmp_path / "dcp"
    assert tool("hf_to_dcp").main([str(tmp_path / "hf"), str(out), "--verify"]) == 0
    assert "gives the same logits" in capsys.readouterr().out
    assert "whole: step 0" in verify(out)

    # Plain torch reads it, with nothing of ours.
    state = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    dcp.load({"model": state}, checkpoint_id=out, no_dist=True)
    assert_equal(state, {name: parameter.detach() for name, parameter in model.named_parameters()})

    dcp_to_hf(out, tmp_path / "back")
    assert_equal(exported(tmp_path / "back"), exported(tmp_path / "hf"))
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_a_file_is_written_a_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against safetensors' own reader: every dtype, scalars, empty tensors, views, tensors of several blocks."""
    tensors = {
        "odd": torch.arange(7, dtype=torch.int8),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "view": torch.arange(12.0).reshape(3, 4).T,
        "half": torch.randn(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
    }
    monkeypatch.setattr(safetensors_file, "LET_GO_BYTES", 16)
    forms = {name: tensor.to("meta") for name, tensor in tensors.items()}
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 8)
    write_safetensors(tmp_path / "x.safetensors", forms, MappingReader(tensors))
    assert_equal(load_file(tmp_path / "x.safetensors"), tensors)
    assert (tmp_path / "x.safetensors").stat().st_size == file_size(forms)


def test_what_cannot_become_a_checkpoint_is_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        hf_to_dcp(tmp_path, tmp_path / "out")
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken: exists"):
        hf_to_dcp(tmp_path / "hf", tmp_path / "taken")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        hf_to_dcp(tmp_path / "hf", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "taken"]


def test_logits_that_differ_are_told(tmp_path: Path, checkpoint: Path, model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(RunFailure, match="its logits differ from those of"):
        compare_logits(checkpoint, tmp_path / "hf")


# Names beside an export


def of_a_user(folder: Path, name: str) -> Path:
    """A directory with a thesis in it."""
    (folder / name).mkdir()
    (folder / name / "thesis.txt").write_text("mine")
    return folder / name / "thesis.txt"


def test_what_a_user_has_beside_an_export_stays(tmp_path: Path, checkpoint: Path, model: PreTrainedModel) -> None:
    """Under names that exports once had, and under one like today's, without our record."""
    names = [
        ".out.old",
        ".out.partial",
        ".back.partial",
        ".out.fsdp2kit-0123abcd.old",
        ".out.fsdp2kit-0123abcd.partial",
    ]
    theirs = [of_a_user(tmp_path, name) for name in names]
    (tmp_path / "elsewhere").mkdir()
    linked = of_a_user(tmp_path / "elsewhere", "linked")
    (linked.parent / ".fsdp2kit-export.json").write_text('{"files": []}')
    (tmp_path / ".out.fsdp2kit-4567abcd.old").symlink_to(linked.parent)
    for _ in range(2):
        dcp_to_hf(checkpoint, tmp_path / "out")
    hf_to_dcp(tmp_path / "out", tmp_path / "back")
    assert [path.read_text() for path in (*theirs, linked)] == ["mine"] * 6
    assert {path.name for path in tmp_path.iterdir()} == {
        *names, ".out.fsdp2kit-4567abcd.old", "elsewhere", "run", "out", "back"
    }  # fmt: skip


@pytest.mark.parametrize("point", ["begun", "half", "published", "moved", "swapped"])
def test_what_a_killed_export_left_is_cleared_away(
    point: str, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each step of replacing an export: the next one clears up, and one of the two was always there."""
    out = tmp_path / "out"
    dcp_to_hf(checkpoint, out, dtype="float32")
    before = exported(out)

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(ExportDirectory, "abandon", lambda self: None)  # a killed process clears nothing up
    renamed, count = Path.rename, iter(range(9))

    def rename(path: Path, target: Path) -> Path:
        if "fsdp2kit-" in f"{path}{target}" and next(count) == (point == "swapped"):
            kill()
        return renamed(path, target)

    if point == "begun":
        monkeypatch.setattr(export_directory, "mark", kill)
    elif point == "half":
        monkeypatch.setattr(hf, "write_safetensors", kill)
    elif point == "published":
        monkeypatch.setattr(export_directory, "sync_tree", kill)
    else:
        monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Killed):
        dcp_to_hf(checkpoint, out, dtype="bfloat16")
    monkeypatch.undo()
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".out.")]
    assert len(left) == 1 + (point in ("moved", "swapped"))
    whole = [path for path in (*left, out) if path.is_dir() and (path / "model.safetensors").is_file()]
    assert any(exported(path).keys() == before.keys() for path in whole)
    dcp_to_hf(checkpoint, out, dtype="bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_what_a_killed_conversion_left_is_cleared_away(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp_to_hf(checkpoint, tmp_path / "hf")

    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(from_hf, "save_tensors", kill)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        hf_to_dcp(tmp_path / "hf", tmp_path / "dcp")
    monkeypatch.undo()
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(".dcp.")]) == 1
    hf_to_dcp(tmp_path / "hf", tmp_path / "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf", "run"]
    assert "whole" in verify(tmp_path / "dcp")


# Dtypes


def test_a_conversion_says_its_dtype_and_why(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    for tool_name, arguments, says in (
        (
            "dcp_to_hf",
            [str(checkpoint), out],
            f"{out}: written in bfloat16, which the checkpoint names for its exports",
        ),
        ("dcp_to_hf", [str(checkpoint), out, "--dtype", "float16"], f"{out}: written in float16, as asked for"),
        ("hf_to_dcp", [out, back], f"{back}: written in float16, as its source has it"),
    ):
        assert tool(tool_name).main(arguments) == 0
        assert capsys.readouterr().out.splitlines() == [says]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_a_name_for_its_dtype_a_conversion_is_float32(tmp_path: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(tmp_path / "hf")
    path = plain_dcp(model.state_dict(), tmp_path / "dcp")
    said = dcp_to_hf(path, tmp_path / "out", config_dir=tmp_path / "hf")
    assert said == "float32, since the checkpoint names no dtype for its exports"


# Indexes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../hidden.safetensors", r"names '\.\./hidden\.safetensors', which is no file in its directory"),
        ("sub/../../hidden.safetensors", "which is no file in its directory"),
        ("ABSOLUTE", "which is no file in its directory"),
        ("", "which is no file in its directory"),
        ("fifo", "names 'fifo', which is not a regular file"),
        ("folder", "names 'folder', which is not a regular file"),
        (7, "names no file for model.norm.weight, but 7"),
        ([], r"names no file for model.norm.weight, but \[\]"),
        ("missing.safetensors", "is named in the index but missing"),
    ],
)
def test_an_index_that_names_no_file_of_its_directory_is_refused(
    name: Any, says: str, tmp_path: Path, model: PreTrainedModel
) -> None:
    path, name = tmp_path / "hf", str(tmp_path / "hidden.safetensors") if name == "ABSOLUTE" else name
    model.save_pretrained(path, max_shard_size="1KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shutil.copy(path / index["weight_map"]["model.norm.weight"], tmp_path / "hidden.safetensors")
    index["weight_map"]["model.norm.weight"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "folder").mkdir()
    os.mkfifo(path / "fifo")
    with pytest.raises(UserError, match=says):
        hf_to_dcp(path, tmp_path / "out")
    if says != "is named in the index but missing":
        with pytest.raises(UserError, match=says):  # transformers would open it
            load_whole(path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_file_is_written_by_one_rank(tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, str]] = []
    monkeypatch.setattr(hf, "transfer", lambda entries, reader, sink: written.append((at, entries)))
    source: Any = SimpleNamespace(manifest=None)
    files: Any = {name: SimpleNamespace(entries=name, size=1) for name in "abc"}
    plan: Any = SimpleNamespace(source=source, reader=nullcontext, files=files)
    for at in range(world_size):
        write_files(plan, tmp_path, rank=at, world_size=world_size)
    assert sorted(name for _, name in written) == ["a", "b", "c"]
    assert {at for at, _ in written} == {*range(min(3, world_size))}


def test_a_file_that_is_not_whole_is_not_published(tmp_path: Path, checkpoint: Path) -> None:
    """One byte short; the former export stays, and nothing is left beside it."""
    out = tmp_path / "out"
    dcp_to_hf(checkpoint, out, dtype="float32")
    directory, before = ExportDirectory(out), (out / "model.safetensors").read_bytes()
    with open_source(checkpoint, None) as source:
        plan = plan_export(source, dtype="bfloat16")
        cut = plan.files["model.safetensors"].size - 1

        def write() -> None:
            with directory.replaced(plan) as folder:
                write_files(plan, folder)
                os.truncate(folder / "model.safetensors", cut)

        with pytest.raises(RunFailure, match="was not written, or not whole"):
            write()
    assert (out / "model.safetensors").read_bytes() == before
    assert directory.is_whole()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
