"""The checkpoints of a run: where it starts from, what is saved, and which saves are exported."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, RepoUrl
from safetensors.torch import load_file

from fsdp2kit.checkpoint.adapter import base_of, check_same_base, describe_base
from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import ExportDtype, ExportPlan, choose_dtype, into_files
from fsdp2kit.checkpoint.identity import check_same_run, run_identity
from fsdp2kit.checkpoint.manifest import read_manifest
from fsdp2kit.checkpoint.merge import _find_base
from fsdp2kit.checkpoint.run import build_checkpoints
from fsdp2kit.checkpoint.staging import clear_beside, make_beside, mark
from fsdp2kit.config import TrainingConfig, dump_toml
from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.config.schema import CheckpointConfig, ModelConfig, RunConfig
from fsdp2kit.config.sections.distill import DistillConfig
from fsdp2kit.config.sections.dpo import AnyDPO, PlainDPOConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.events import Events
from fsdp2kit.job.progress import Progress
from fsdp2kit.model.build import build_model
from fsdp2kit.rl.evaluation import RewardEvaluation
from fsdp2kit.weights.record import ModelSource, source_of, weights_of
from fsdp2kit.weights.stored import weights_digest
from fsdp2kit.weights.transfer import WeightEntry
from tests.checkpoint import helpers
from tests.checkpoint.helpers import checkpoints_of, exported_step, flip


@pytest.mark.parametrize(
    ("when", "steps"), [("every", [2, 3]), ("final", [None, 3]), ("never", [None, None])], ids=lambda value: str(value)
)
def test_saves_are_exported_when_the_section_says(tmp_path: Path, when: str, steps: list[int | None]) -> None:
    checkpoints = checkpoints_of(tmp_path, export_hf=when)
    for step, expected in zip((2, 3), steps, strict=True):
        checkpoints.save(helpers.progress_at(step), is_over=step == 3)
        assert exported_step(tmp_path / "hf") == expected
    manifest = read_manifest(tmp_path / "checkpoints" / "step-000003")
    assert manifest.progress["wandb_id"] == helpers.progress_at(3).wandb_id


def test_an_export_goes_where_the_section_says(tmp_path: Path) -> None:
    checkpoints = checkpoints_of(tmp_path / "run", export_dir=str(tmp_path / "elsewhere"), export_dtype="float32")
    checkpoints.save(helpers.progress_at(3), is_over=True)
    assert not (tmp_path / "run" / "hf").exists()
    found = load_file(tmp_path / "elsewhere" / "model.safetensors")["model.norm.weight"]
    assert (found == helpers.tiny_llama().model.norm.weight).all()


def test_the_final_export_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(HfApi, "create_repo", lambda _, name, **options: RepoUrl(f"https://huggingface.co/{name}"))
    monkeypatch.setattr(HfApi, "upload_folder", lambda _, **options: calls.append(options))
    checkpoints = checkpoints_of(tmp_path, push_to_hub="me/mine")
    checkpoints.save(helpers.progress_at(3), is_over=True)
    assert not any("me/mine" in line for line in checkpoints.describe_end(is_over=False))
    assert checkpoints.describe_end(is_over=True)[-1] == "uploaded to https://huggingface.co/me/mine"
    [call] = calls
    assert (call["repo_id"], call["folder_path"]) == ("me/mine", tmp_path / "hf")
    assert call["ignore_patterns"] == [".fsdp2kit-export.json"]


def test_an_outage_of_the_hub_is_a_line(tmp_path: Path) -> None:
    # The hub is out of reach of all tests.
    checkpoints = checkpoints_of(tmp_path, push_to_hub="me/mine")
    checkpoints.save(helpers.progress_at(3), is_over=True)
    line = checkpoints.describe_end(is_over=True)[-1]
    assert line.startswith("checkpoint.push_to_hub: me/mine: not uploaded (")
    assert line.endswith(f"`hf upload me/mine {tmp_path / 'hf'}` uploads it later")


def test_what_a_killed_run_did_not_export_is_exported_on_resume(tmp_path: Path) -> None:
    checkpoints = checkpoints_of(tmp_path)
    checkpoints.export_resumed(Progress(), is_over=True)  # nothing was resumed from
    for step in (2, 3):
        checkpoints.save(helpers.progress_at(step), is_over=step == 3)
    shutil.rmtree(tmp_path / "hf")
    resumed = checkpoints_of(tmp_path)
    assert resumed.start() == helpers.progress_at(3)
    assert resumed.resumed == tmp_path / "checkpoints" / "step-000003"
    resumed.export_resumed(helpers.progress_at(3), is_over=False)
    assert exported_step(tmp_path / "hf") is None
    resumed.export_resumed(helpers.progress_at(3), is_over=True)
    assert exported_step(tmp_path / "hf") == 3


def test_the_best_of_another_history_is_not_exported(tmp_path: Path) -> None:
    """A directory may hold a checkpoint of the best step's number that an earlier run left there."""
    for loss, expected in ((1.5, 2), (1.25, 3)):
        folder = tmp_path / str(loss)
        earlier = checkpoints_of(folder)
        earlier.save(replace(helpers.progress_at(2), best_step=2, best_eval_loss=1.5))
        checkpoints = checkpoints_of(folder, export="best", keep=9)
        checkpoints._reached = 2
        checkpoints.save(replace(helpers.progress_at(3), best_step=2, best_eval_loss=loss), is_over=True)
        assert exported_step(folder / "hf") == expected


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_damaged_best_is_not_exported(tmp_path: Path, is_resumed: bool) -> None:
    checkpoints = checkpoints_of(tmp_path, export="best", keep=9, keep_best=True)
    checkpoints.save(replace(helpers.progress_at(2), best_step=2, best_eval_loss=1.5))
    flip(tmp_path / "checkpoints" / "step-000002")
    last = replace(helpers.progress_at(3), best_step=2, best_eval_loss=1.5)
    if is_resumed:
        checkpoints.save(last)
        checkpoints = checkpoints_of(tmp_path, export="best", keep=9, keep_best=True)
        assert checkpoints.start() == last
    end = checkpoints.export_resumed if is_resumed else checkpoints.save
    with pytest.raises(Exception, match="does not have the checksum it was written with"):
        end(last, is_over=True)
    assert exported_step(tmp_path / "hf") is None


def test_the_best_is_named_by_what_was_measured(tmp_path: Path) -> None:
    """A run with rewards names the reward, which rises as ``eval_loss`` falls."""
    checkpoints = checkpoints_of(tmp_path, export="best")
    checkpoints.save(replace(helpers.progress_at(2), best_step=2, best_eval_loss=-5.0), is_over=True)
    for maximizes, said in ((None, "eval_loss -5"), (RewardEvaluation.maximizes, "eval_reward 5")):
        lines = checkpoints.describe_end(is_over=True, maximizes=maximizes)
        assert f"model: {tmp_path / 'hf'}, of step-000002, the best ({said})" in lines


def test_they_are_built_alone_from_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source, a fresh start from its weights, a save, and a resume that says what has changed."""
    source = helpers.tiny_llama().bfloat16()
    source.save_pretrained(tmp_path / "source")
    job: Any = SimpleNamespace(environment={"world_size": 1, "versions": {"torch": "1"}}, events=Events())
    data: Any = SimpleNamespace(fingerprint="of the data", total_steps=5, endings=(), contents={})

    def built(model: Any, resume: str = "auto", **settings: Any) -> Checkpoints:
        run = RunConfig(dir=str(tmp_path / "run"), resume=resume)
        config = TrainingConfig(recipe="sft", model=ModelConfig(path=str(tmp_path / "source")), run=run, **settings)
        (tmp_path / "run").mkdir(exist_ok=True)
        weights_of(model).source = source_of(build_model(config.model))
        return build_checkpoints(config, model, helpers.adamw(model), job=job, data=data, tokenizer=None)

    fresh = helpers.tiny_llama(seed=1)
    with built(fresh) as checkpoints:
        assert checkpoints.start() == Progress()
        assert checkpoints.describe() == []
        assert torch.equal(fresh.model.norm.weight, source.model.norm.weight.float())
        assert checkpoints.describe_end(is_over=False) == []
        path = checkpoints.save(helpers.progress_at(1), is_over=True)
    out = tmp_path / "run" / "hf"
    saved, exported = capsys.readouterr().out.splitlines()
    assert saved.startswith(f"saved {path} (")
    assert exported == f"exported {path.name} to {out} (bfloat16)"
    assert checkpoints.describe_end(is_over=True) == [f"checkpoint: {path}", f"model: {out}, of {path.name}"]
    checkpoints.can_answer = True
    assert checkpoints.describe_end(is_over=True)[2] == f'try it: fsdp2kit generate {out} "…"'
    manifest = read_manifest(path)
    assert manifest.identity["data"] == "of the data"
    assert manifest.environment == job.environment
    config = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])

    job.environment = {"world_size": 2, "versions": {"torch": "1"}}
    again = helpers.tiny_llama(seed=1)
    with built(again) as checkpoints:
        assert checkpoints.start() == helpers.progress_at(1)
        settings = dump_toml(checkpoints.config)  # earlier versions saved keys that had no effect, too
        for section, idle in (("optimizer", "muon_momentum = 0.95"), ("model", 'loss_kernel = "auto"')):
            settings = settings.replace(f"[{section}]", f"[{section}]\n{idle}")
        (path / "config.toml").write_text(settings)
        assert checkpoints.describe() == ["resumed from step 1; changed since: world_size 1 → 2"]
        assert torch.equal(again.model.norm.weight, fresh.model.norm.weight)
    with built(again, resume="never", checkpoint=CheckpointConfig(export_hf="never")) as checkpoints:
        assert checkpoints.start() == Progress()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.limit", 5),
        ("eval.split", 0.02),
        ("eval.split", 500),
        ("rollout.n", 4),
        ("rollout.updates", 2),
        ("grpo.loss", "dapo"),
        ("dpo.loss", "ipo"),
        ("distill.direction", "reverse"),
    ],
)
def test_other_rows_losses_or_groups_are_another_run(key: str, value: Any, tmp_path: Path) -> None:
    class Config(RLConfig):
        dpo: AnyDPO = PlainDPOConfig()
        distill: DistillConfig = DistillConfig()

    section, _, name = key.partition(".")
    source = ModelSource(None, None, helpers.tiny_llama().config)

    def identity(**sections: Any) -> dict[str, str]:
        return run_identity(
            Config.model_validate({"recipe": "x", "reward": [{"function": "a:b"}], **sections}), source, data="d"
        )

    plain, changed = identity(), identity(**{section: {name: value}})
    assert {one for one in plain.keys() | changed.keys() if plain.get(one) != changed.get(one)} == {key}
    assert identity(grpo={"clip_low": 0.1}, dpo={"beta": 0.5}, eval={"split": "test"}) == plain
    with pytest.raises(UserError, match=f"was made with {key} = .*, and this run has {key} = '{value}'; undo that"):
        check_same_run(tmp_path, saved=plain, current=changed)


@pytest.mark.parametrize(
    ("field", "changed", "says"),
    [
        ("model", {"model.config.rope_theta": [None, 5]}, " (changed: model.config.rope_theta unset → 5)"),
        ("model", {"model.path": ["a", "b"], "train.steps": [1, 2]}, " (changed: model.path a → b)"),
        ("data", {"data.overlong": ["truncate", "drop"]}, " (changed: data.overlong truncate → drop)"),
        ("data", {"model.chat_template": [None, "chatml"]}, " (changed: model.chat_template unset → chatml)"),
        ("run.seed", {"run.seed": [1, 2]}, ""),
        ("model", {}, ""),
    ],
)
def test_keys_behind_a_digest_are_named(field: str, changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        check_same_run(tmp_path, saved={field: "1"}, current={field: "2"}, changed=changed)
    assert refusal.value.what == f"was made with {field} = '1', and this run has {field} = '2'{says}"


def test_other_weights_are_another_run(tmp_path: Path) -> None:
    """The model's, a teacher's, an adapter's that is trained further, and those of a checkpoint to start from."""

    class Config(TrainingConfig):
        distill: DistillConfig = DistillConfig(teacher="teacher")

    for name in ("one", "other"):
        helpers.tiny_llama(seed=len(name)).save_pretrained(tmp_path / name)
    one, other = tmp_path / "one", tmp_path / "other"
    saved = [checkpoints_of(tmp_path / f"run{n}").save(helpers.progress_at(n)) for n in (1, 2)]
    start = shutil.copytree(saved[0], tmp_path / "start")
    model = {"path": str(one)}

    def identity(source: Path | None, teacher: Path, directory: Path = one, **sections: Any) -> dict[str, str]:
        config = Config.model_validate({"recipe": "x", "model": model, **sections})
        adapter: Any = SimpleNamespace(directory=directory, identity=lambda: {"lora.rank": "4"})
        built = ModelSource(None, source, helpers.tiny_llama().config)
        return run_identity(config, built, data="d", models={"distill.teacher": teacher}, adapter=adapter)

    plain, from_checkpoint = identity(one, one), identity(one, one, model={**model, "weights": str(start)})
    shutil.rmtree(start)
    shutil.copytree(saved[1], start)
    differing = {
        "model.weights": [
            (plain, identity(other, one)),
            (from_checkpoint, identity(one, one, model={**model, "weights": str(start)})),
        ],
        "distill.teacher": [(plain, identity(one, other))],
        "model.adapter": [(plain, identity(one, one, other))],
    }
    for key, pairs in differing.items():
        for before, now in pairs:
            assert {name for name in before if before[name] != now[name]} == {key}
            with pytest.raises(UserError, match=f"was made with {key} = "):
                check_same_run(tmp_path, saved=before, current=now)


def test_an_export_does_not_replace_what_the_run_reads(tmp_path: Path) -> None:
    """Which may be an export of ours, so its files alone do not tell."""
    checkpoints_of(tmp_path / "run").save(helpers.progress_at(3), is_over=True)
    out = tmp_path / "run" / "hf"
    ExportDirectory(out).check_replaceable()
    with pytest.raises(UserError, match="is read here, and the export would replace it; choose another directory"):
        ExportDirectory(tmp_path / "run" / "." / "hf").check_replaceable(read=[None, out])


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/hf", ".", ".."])
def test_an_export_and_checkpoints_do_not_lie_in_each_other(tmp_path: Path, place: str) -> None:
    run_dir = tmp_path / "a" / "run"
    with pytest.raises(UserError, match=r"checkpoint\.export_dir: .* lie in each other; choose another directory"):
        checkpoints_of(run_dir, export_dir=os.path.normpath(run_dir / place))


def test_what_must_not_be_replaced_ends_no_run_before_its_end(tmp_path: Path) -> None:
    told: list[str] = []
    checkpoints = checkpoints_of(tmp_path / "run", export_hf="every", async_save=False)
    checkpoints.run_export._tell = told.append
    checkpoints.save(helpers.progress_at(3))
    (tmp_path / "run" / "hf" / "notes.txt").write_text("mine")
    checkpoints.save(helpers.progress_at(4))
    assert "training goes on" in told[-1]
    assert "holds notes.txt, which no export of fsdp2kit wrote there" in told[-1]
    with pytest.raises(UserError, match=r"holds notes\.txt"):
        checkpoints.save(helpers.progress_at(5), is_over=True)
    assert (tmp_path / "run" / "hf" / "notes.txt").read_text() == "mine"
    assert [path.name for path in checkpoints.store.root.glob("step-*")]


def test_an_adapter_that_names_another_model_is_warned_of(tmp_path: Path) -> None:
    """By its config, which is all that peft writes; an export of ours records which weights it was trained on."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/a-model"}))
    [line] = describe_base(tmp_path, "/models/another")
    assert line.startswith(f"warning: model.adapter: {tmp_path} names org/a-model as its model, and model.path is ")
    assert describe_base(tmp_path, "/models/a-model") == []
    (tmp_path / ".fsdp2kit-export.json").write_text("{}")
    assert describe_base(tmp_path, "/models/another") == []


def write_record(folder: Path, **record: Any) -> Path:
    folder.mkdir()
    (folder / ".fsdp2kit-export.json").write_text(json.dumps(record))
    return folder


def test_an_adapter_of_other_weights_is_refused_where_its_export_tells(tmp_path: Path) -> None:
    same, none = write_record(tmp_path / "same", base="pretrained abc"), write_record(tmp_path / "none")
    for directory in (same, none, tmp_path / "missing"):
        check_same_base(directory, "pretrained abc")
    with pytest.raises(UserError, match=r"same was trained on another model .* \(its weights are pretrained abc\)"):
        check_same_base(same, "pretrained abd")


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"base_model_name_or_path": "a"}', "a"), ('{"base_model_name_or_path": null}', None), ("{}", None)],
)
def test_the_model_that_an_adapter_names(text: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    assert base_of(tmp_path) == expected
    for wrong in ('{"base_model_name_or_path": 3}', "[]", "{"):
        (tmp_path / "adapter_config.json").write_text(wrong)
        with pytest.raises(UserError, match="is not an adapter's config"):
            base_of(tmp_path)


def test_the_best_is_looked_for_here_and_where_the_run_resumed_from(tmp_path: Path) -> None:
    """A run that was taken up elsewhere has its best step there; its own comes first, and none is the newest."""
    progress = replace(helpers.progress_at(9), best_step=2, best_eval_loss=1.5)
    best = replace(helpers.progress_at(2), best_step=2, best_eval_loss=1.5)
    export = checkpoints_of(tmp_path / "here", export="best", export_hf="every", keep=9).run_export
    newest, there = tmp_path / "newest", tmp_path / "there" / "checkpoints" / "step-000007"

    def due(*, progress: Progress = progress, is_over: bool = True) -> Path | None:
        return export._due(progress, newest, there, is_over=is_over)

    assert due() == newest, "no checkpoint was kept"
    elsewhere = checkpoints_of(tmp_path / "there", keep=9).save(best)
    assert due() == elsewhere == there.with_name("step-000002")
    here = checkpoints_of(tmp_path / "here", keep=9).save(best)
    assert due() == here
    assert due(progress=replace(progress, step=2)) == due(progress=helpers.progress_at(9)) == newest
    export._when = "final"
    assert (due(is_over=False), due()) == (None, here)


def test_only_what_an_earlier_process_left_of_this_place_is_cleared(tmp_path: Path) -> None:
    """A mark, or nothing in it yet, makes a directory ours; names and links of others are left alone."""
    place, digits = tmp_path / "a.b", "0123abcd"
    ours = [make_beside(place, "partial") for _ in range(2)]
    mark(ours[0])
    names = [".a.b.fsdp2kit-x.partial", f".a.b.fsdp2kit-{digits}.old", f".axb.fsdp2kit-{digits}.partial", "a.b"]
    theirs = [tmp_path / name for name in [*names, f".a.b.fsdp2kit-{digits}.partial"]]
    for path in theirs:
        path.mkdir()
    (theirs[-1] / "not marked").touch()
    link = tmp_path / ".a.b.fsdp2kit-00000000.partial"
    link.symlink_to(theirs[0])
    clear_beside(place, "partial")
    assert {*tmp_path.iterdir()} == {*theirs, link}
    clear_beside(tmp_path / "missing" / "x", "partial")


@pytest.mark.parametrize(
    ("asked", "named", "expected"),
    [
        ("float16", [("bfloat16", "n")], ("float16", "as asked for")),
        (None, [(None, "a"), ("bfloat16", "b"), ("float32", "c")], ("bfloat16", "b")),
        (None, [("int8", "a"), ("float32", "b")], "'int8' is not a dtype for exports"),
        ("float64", [("float32", "a")], "'float64' is not a dtype for exports"),
    ],
)
def test_which_dtype_an_export_has(asked: str | None, named: list[tuple[str | None, str]], expected: Any) -> None:
    if isinstance(expected, tuple):
        chosen = choose_dtype(asked, named)
        assert (chosen.name, chosen.reason) == expected
        assert chosen.torch == getattr(torch, chosen.name)
        return
    with pytest.raises(UserError, match=expected):
        choose_dtype(asked, named)


def test_files_of_weights_are_filled_in_order_with_wider_dtypes_first() -> None:
    """A tensor that is larger than a file has one of its own; the other file is exactly full."""
    dtypes = [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    tensors = {str(at): torch.empty(size) for at, size in enumerate((10, 10, 90, 20))}
    entries = []
    for (name, one), dtype in zip(tensors.items(), dtypes, strict=True):
        meta = {name: torch.empty_like(one, dtype=dtype, device="meta")}
        entries.append(WeightEntry(meta, meta))
    files = into_files(entries, 100)
    assert [[*file.forms] for file in files.values()] == [["2"], ["1", "0", "3"]]
    plan = ExportPlan(Path(), ExportDtype("bfloat16", "x"), files)
    assert plan.describe_dtype() == "bfloat16, x; 2 tensors stay in float32"
    assert [*files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_an_adapter_is_merged_into_the_model_that_it_was_trained_on(tmp_path: Path) -> None:
    """By the digest of its weights, wherever it is now; a checkpoint without a manifest does not tell."""
    for seed, name in enumerate(("one", "other")):
        helpers.tiny_llama(seed=seed).save_pretrained(tmp_path / name)
    one, other = tmp_path / "one", tmp_path / "other"
    named = tmp_path / "adapter_config.json"
    manifest = SimpleNamespace(identity={"model.weights": f"pretrained {weights_digest(one)}"})

    def find(base: Path | None, *, known: Any = manifest) -> Path:
        source: Any = SimpleNamespace(config_dir=tmp_path, manifest=known)
        return _find_base(source, None if base is None else str(base))

    named.write_text("{}")
    with pytest.raises(UserError, match="the adapter's config names no model"):
        find(None)
    assert find(one) == one
    named.write_text(json.dumps({"base_model_name_or_path": str(other)}))
    with pytest.raises(UserError, match=r"other holds other weights than the adapter was trained on"):
        find(None)
    assert find(one) == one
    assert find(None, known=None) == other
    assert find(None, known=SimpleNamespace(identity={})) == other


def test_a_file_in_an_exports_place_is_refused(tmp_path: Path) -> None:
    ExportDirectory(tmp_path / "hf").check_replaceable()
    (tmp_path / "hf").write_text("mine")
    with pytest.raises(UserError, match=r"hf: is not a directory; choose another directory, or move that away"):
        ExportDirectory(tmp_path / "hf").check_replaceable()
