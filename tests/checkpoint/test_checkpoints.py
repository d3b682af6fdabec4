"""Save and restore: bit for bit, over any world size, with nothing lost on the way."""

from __future__ import annotations

import itertools
import json
import multiprocessing as mp
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fsdp2kit.checkpoint.__main__ import main
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.keys import find_weights
from fsdp2kit.checkpoint.manifest import (
    Manifest,
    check_contents,
    holds_best,
    in_use,
    read_manifest,
    read_progress,
    verify,
)
from fsdp2kit.checkpoint.state import _whole_rows, initialise_state, load_weights, model_tensors, optimizer_tensors
from fsdp2kit.checkpoint.store import CheckpointStore
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.weights.record import find_ties
from tests.checkpoint import helpers
from tests.checkpoint.helpers import assert_same, flip, names, saved_alone, truncate
from tests.support.models import full
from tests.support.workers import WorkerPool


@pytest.mark.parametrize(("tied", "replicate"), [(True, 1), full(False, 2)])
def test_state_survives_any_change_of_world_size(pool: WorkerPool, tmp_path: Path, tied: bool, replicate: int) -> None:
    saved = pool.run(2, helpers.train_and_save, tmp_path, tied=tied, replicate=replicate)[0]

    for size in (1, 3):
        for state, progress, rate in pool.run(size, helpers.restore, tmp_path, tied=tied):
            assert_same(saved, state)
            assert progress == helpers.progress_at(2)
            assert rate == 0.5  # the config's, not the checkpoint's

    model = helpers.tiny_llama(seed=1, tied=tied)  # and without a process group, unsharded
    optimizer = helpers.adamw(model)
    checkpoints = helpers.checkpoints_of(tmp_path, model, optimizer)
    path = checkpoints.resolve("auto")
    assert path is not None
    assert path == tmp_path / "checkpoints" / "step-000002"
    checkpoints.restore(path)
    assert_same(saved, helpers.full_state(model, optimizer))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_contents_are_named_once_and_state_is_made_without_a_trace() -> None:
    model = helpers.tiny_llama()
    optimizer = helpers.adamw(model)
    ids = torch.arange(12).unsqueeze(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    gradients = [parameter.grad for parameter in model.parameters()]

    tensors = optimizer_tensors(model, optimizer)

    assert "lm_head.weight" not in model_tensors(model)
    assert find_ties(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(old is p.grad for old, p in zip(gradients, model.parameters(), strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    assert {f"state.{name}.{field}" for name in before for field in ("step", "exp_avg", "exp_avg_sq")} == set(tensors)
    assert all(not tensor.any() for tensor in tensors.values())

    # An optimizer whose state was made beforehand takes the very same step.
    untouched = helpers.tiny_llama()
    plain = helpers.adamw(untouched)
    untouched(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    plain.step()
    assert_same(helpers.full_state(untouched, plain), helpers.full_state(model, optimizer))


def test_state_that_is_there_stays_where_other_state_is_made() -> None:
    model = torch.nn.Linear(3, 2)  # a step without a gradient for the bias, like experts without tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    before = {field: value.clone() for field, value in optimizer.state[model.weight].items()}

    initialise_state(optimizer)

    assert all(torch.equal(optimizer.state[model.weight][field], value) for field, value in before.items())
    assert not any(value.any() for value in optimizer.state[model.bias].values())


@pytest.mark.parametrize(
    ("optimizer", "momentum"), [(torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})]
)
def test_other_optimizers_resume_as_if_never_interrupted(tmp_path: Path, optimizer, momentum: dict) -> None:
    """SGD keeps no step count, without momentum no state at all, and Adagrad has its own before the first step."""

    def fresh(seed: int):
        model = helpers.tiny_llama(seed=seed)
        return model, optimizer(model.parameters(), lr=0.1, **momentum)

    model, plain = fresh(0)
    helpers.train(model, plain, range(4))
    for first in (0, 2):  # saved before the first step, and after two
        half, before = fresh(0)
        helpers.train(half, before, range(first))
        path = helpers.checkpoints_of(tmp_path, half, before).save(helpers.progress_at(first))
        resumed, after = fresh(1)
        helpers.checkpoints_of(tmp_path, resumed, after).restore(path)
        helpers.train(resumed, after, range(first, 4))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True)), first


def test_layout_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('recipe = "sft"\n')
    _, path = saved_alone(tmp_path, 200)
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assets = {"hf/config.json", "hf/tokenizer.json", "hf/chat_template.jinja"}
    assert files == {"__0_0.distcp", ".metadata", "config.toml", "manifest.json", *assets}
    manifest = json.loads((path / "manifest.json").read_text())
    assert path.name == "step-000200"
    assert manifest["identity"] == helpers.IDENTITY
    assert manifest["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert manifest["export_dtype"] == "bfloat16"
    assert set(manifest["files"]) == files - {"manifest.json"}


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_newest_the_best_and_every_so_many_steps_are_kept(tmp_path: Path, keep_best: bool) -> None:
    checkpoints = helpers.checkpoints_of(tmp_path, keep=2, keep_every=4, keep_best=keep_best)
    for step in range(1, 12):
        checkpoints.save(replace(helpers.progress_at(step), best_step=min(step, 3)))
    checkpoints.finish()
    assert names(tmp_path) == [f"step-{step:06d}" for step in (*([3] if keep_best else []), 4, 8, 10, 11)]


def test_a_directory_without_a_manifest_does_not_count_as_kept(tmp_path: Path) -> None:
    checkpoints, _ = saved_alone(tmp_path, 1, 2, keep=2)
    checkpoints.store.path(9).mkdir()
    checkpoints.store.retain(2)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000009"]


def read_for_a_while(path: Path, ready: Path) -> None:
    with in_use(path):
        ready.touch()
        time.sleep(60)


def test_what_another_process_is_reading_is_kept_until_it_is_done(tmp_path: Path) -> None:
    checkpoints, path = saved_alone(tmp_path, 1, keep=1)
    reader = mp.get_context("fork").Process(target=read_for_a_while, args=(path, tmp_path / "ready"))
    reader.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    checkpoints.save(helpers.progress_at(2))
    checkpoints.finish()
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert "whole" in verify(path)
    reader.kill()
    reader.join()
    checkpoints.save(helpers.progress_at(3))
    checkpoints.finish()
    assert names(tmp_path) == ["step-000003"]


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    _, path = saved_alone(tmp_path, 1, 1)
    assert names(tmp_path) == ["step-000001"]
    assert "step 1" in verify(path)


def test_our_leftovers_are_removed_and_strange_directories_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, path = saved_alone(tmp_path, 1)
    shutil.copytree(path, path.with_name("step-000002"))
    (path.with_name("step-000002") / "manifest.json").unlink()
    shutil.copytree(path, path.with_name(".tmp-step-000003"))
    assert checkpoints.resolve("auto") == path
    assert "step-000002: skipped" in caplog.text
    aside = []
    for step in (4, 5, 6, 7):
        (path.with_name("step-000002")).mkdir(exist_ok=True)
        checkpoints.save(helpers.progress_at(step))
        aside.append("step-000002.incomplete" + (f"-{len(aside) + 1}" if aside else ""))
        assert "set aside as " + aside[-1] in caplog.text
    checkpoints.finish()
    assert names(tmp_path) == [*aside, "step-000006", "step-000007"]
    assert (path.with_name(aside[0]) / "__0_0.distcp").is_file()


def test_a_deletion_cut_short_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = saved_alone(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr("fsdp2kit.checkpoint.store.shutil.rmtree", lambda path, **_: (path / "manifest.json").unlink())
        checkpoints.save(helpers.progress_at(2))
        checkpoints.finish()
    assert names(tmp_path) == [".trash-step-000001", "step-000002"]
    resumed = helpers.checkpoints_of(tmp_path)
    assert resumed.resolve("auto") == tmp_path / "checkpoints" / "step-000002"
    resumed.finish()
    assert names(tmp_path) == ["step-000002"]


def test_auto_starts_over_only_where_nothing_was_ever_completed(tmp_path: Path) -> None:
    checkpoints, path = saved_alone(tmp_path, 1)
    (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"step-000001: has no manifest\.json.*; .*in another run\.dir"):
        checkpoints.resolve("auto")
    path.rename(path.with_name(".tmp-step-000001"))  # as a kill during the very first save leaves it
    assert checkpoints.resolve("auto") is None


def test_going_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    _, path = saved_alone(tmp_path, 1, 2, 3, keep=5)
    checkpoints = helpers.checkpoints_of(tmp_path, keep=5)
    checkpoints.restore(path.with_name("step-000001"))
    checkpoints.save(helpers.progress_at(2))
    assert names(tmp_path) == ["step-000001", "step-000002", "superseded-step-000002", "superseded-step-000003"]
    assert checkpoints.resolve("auto") == path.with_name("step-000002")


def test_taken_up_from_another_directory_all_checkpoints_here_are_of_another_history(tmp_path: Path) -> None:
    _, elsewhere = saved_alone(tmp_path / "other", 3)
    saved_alone(tmp_path / "here", 1, 2, keep=5)
    checkpoints = helpers.checkpoints_of(tmp_path / "here", keep=5)
    checkpoints.restore(elsewhere)
    checkpoints.save(helpers.progress_at(4))
    assert names(tmp_path / "here") == ["step-000004", "superseded-step-000001", "superseded-step-000002"]


class Killed(BaseException):
    """What our code does not catch, as nobody catches a SIGKILL."""


def die_after(fatal: int, patch: pytest.MonkeyPatch) -> list[Path]:
    """Let the `fatal`-th rename be the last thing that happens; returns the list of the renamed so far."""
    moved: list[Path] = []

    def then_die(move: Callable[[Path, Path], Path], source: Path, target: Path) -> Path:
        moved.append(move(source, target))
        if len(moved) == fatal:
            raise Killed
        return target

    for name in ("rename", "replace"):
        patch.setattr(Path, name, partialmethod(partial(then_die, getattr(Path, name))))
    return moved


def test_a_kill_after_any_move_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """Step 2 is saved again over an older one, beside one that is no longer kept: every rename is a place to die."""
    _, path = saved_alone(tmp_path / "before", 1, 2, keep=2)
    for fatal in itertools.count(1):
        run_dir = tmp_path / str(fatal)
        shutil.copytree(tmp_path / "before", run_dir)
        path = run_dir / "checkpoints" / "step-000002"
        checkpoints, was_killed = helpers.checkpoints_of(run_dir, keep=1), False
        checkpoints.restore(path)
        with pytest.MonkeyPatch.context() as patch:
            moved = die_after(fatal, patch)
            try:
                checkpoints.save(helpers.progress_at(2))
            except (Killed, RunFailure):  # DCP makes its own exception of whatever it meets
                was_killed = True
        checkpoints.finish()
        steps = [one for one in path.parent.iterdir() if re.fullmatch(r"step-\d{6}", one.name)]
        assert all("whole" in verify(one) for one in steps)
        resumed = helpers.checkpoints_of(run_dir)
        assert resumed.resolve("auto") == path
        resumed.finish()
        if not was_killed:
            assert len(moved) >= 4, "the moves of a save were not seen"
            return


def complains(path: Path, manifest: Manifest, rank: int, world_size: int) -> bool:
    try:
        check_contents(path, manifest, rank=rank, world_size=world_size)
    except UserError:
        return True
    return False


def test_the_shares_of_the_ranks_are_all_files(tmp_path: Path) -> None:
    """However many ranks wrote a checkpoint and however many read it, every file is checked by one of them."""
    _, path = saved_alone(tmp_path, 1)
    record = read_manifest(path).files["__0_0.distcp"]
    files = {f"__{writer}_{number}.distcp": record for writer in range(5) for number in range(2)}
    for name in files.keys() - {"__0_0.distcp"}:
        shutil.copyfile(path / "__0_0.distcp", path / name)
    manifest = replace(read_manifest(path), files={**read_manifest(path).files, **files})
    for size in (1, 2, 3, 5, 8):
        for name in manifest.files:
            content = (path / name).read_bytes()
            (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            assert sum(complains(path, manifest, rank, size) for rank in range(size)) == 1, (name, size)
            (path / name).write_bytes(content)


def test_resolve(tmp_path: Path) -> None:
    checkpoints = helpers.checkpoints_of(tmp_path)
    assert checkpoints.resolve("auto") is None
    _, path = saved_alone(tmp_path, 1)
    assert checkpoints.resolve("never") is None
    assert checkpoints.resolve(str(path)) == path
    with pytest.raises(UserError, match="no such checkpoint directory"):
        checkpoints.resolve(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r"__0_0\.distcp: does not have the checksum it was written with"),
        (truncate, r"__0_0\.distcp: has \d+ bytes instead of"),
        (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0\.distcp: is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), r"manifest\.json: is not a checkpoint's manifest"),
        (lambda path: (path / "manifest.json").write_text("[]"), r"manifest\.json: is not a checkpoint's manifest"),
        (
            lambda path: (path / "manifest.json").write_text('{"format": 2}'),
            "has format 2; this fsdp2kit reads format 1",
        ),
        (lambda path: (path / "manifest.json").unlink(), r"step-000002: has no manifest\.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_path_and_skipped_by_auto(
    tmp_path: Path, damage, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, path = saved_alone(tmp_path, 1, 2)
    damage(path)
    with pytest.raises(UserError, match=message):
        checkpoints.resolve(str(path))
    assert checkpoints.resolve("auto") == path.with_name("step-000001")
    assert re.search(rf"step-000002: skipped: .*{message}", caplog.text)


def test_verify_is_one_line_and_imports_no_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = saved_alone(tmp_path, 1)
    code = (
        "import sys; from fsdp2kit.checkpoint.__main__ import main; "
        f"assert main(['verify', {str(path)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"{path}: whole: step 1, 5 files")
    flip(path)
    capsys.readouterr()
    assert main(["verify", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path / '__0_0.distcp'}: does not have the checksum")
    assert error.count("\n") == 1


def test_a_runs_directory_is_no_checkpoint(tmp_path: Path) -> None:
    saved_alone(tmp_path, 1)
    said = (
        rf"^{re.escape(str(tmp_path))}: is a run's directory, not a checkpoint; name one of those in .*/checkpoints$"
    )
    with pytest.raises(UserError, match=said):
        verify(tmp_path)
    with pytest.raises(UserError, match=said):
        dcp_to_hf(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("flipped", [full(0), 1])
def test_ranks_check_their_shares_and_agree(pool: WorkerPool, tmp_path: Path, flipped: int) -> None:
    for step in (1, 2):
        pool.run(2, helpers.train_and_save, tmp_path / str(step), tied=True, replicate=1)
    one, two = (tmp_path / str(step) / "checkpoints" / "step-000002" for step in (1, 2))
    shutil.copytree(two, one.with_name("step-000003"))
    file = one.with_name("step-000003") / f"__{flipped}_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for size in (1, 2, 3):
        assert pool.run(size, helpers.resolve, one.parents[1], "auto") == [str(one)] * size
        for message in pool.run(size, helpers.resolve, one.parents[1], str(file.parent)):
            assert f"step-000003/{file.name}: does not have the checksum" in message


@pytest.mark.parametrize(("field", "value"), [("data.seq_len", "'24'"), ("extra", "'1'"), ("run.seed", "None")])
def test_another_run_is_refused(tmp_path: Path, field: str, value: str) -> None:
    _, path = saved_alone(tmp_path, 1)
    identity = {**helpers.IDENTITY, field: value.strip("'")}
    if value == "None":
        del identity[field]
    with pytest.raises(UserError, match=rf"{field} = .*{field} = {value}; .*another run\.dir.*model\.weights"):
        helpers.checkpoints_of(tmp_path, identity=identity).restore(path)


def test_another_versions_progress_is_refused(tmp_path: Path) -> None:
    checkpoints, path = saved_alone(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["progress"]["tokens_total"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="another kind of progress: tokens_total"):
        checkpoints.restore(path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tied": False}, r"has no tensor model\.lm_head\.weight"),
        ({"hidden": 8}, r"shape \(97, 16\) in the checkpoint and \(97, 8\)"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, other: dict, message: str) -> None:
    _, path = saved_alone(tmp_path, 1)
    with pytest.raises(UserError, match=message):
        helpers.checkpoints_of(tmp_path, helpers.tiny_llama(**other)).restore(path)


def test_an_unwritable_run_dir_is_a_users_mistake_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in pool.run(2, helpers.resolve, tmp_path / "file" / "run", "never"):
        assert message.startswith("run.dir:")
        assert "Not a directory" in message


def test_an_export_directory_with_the_users_own_files_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"hf: holds notes\.txt, which no export of fsdp2kit wrote there; .* move"):
        helpers.checkpoints_of(tmp_path)
    helpers.checkpoints_of(tmp_path, export_hf="never")


@pytest.mark.parametrize("export_dir", ["/proc/x", "{file}/x", "{file}/x/y"])
def test_an_export_directory_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path, export_dir: str) -> None:
    (tmp_path / "file").write_text("")
    export_dir = export_dir.format(file=tmp_path / "file")
    with pytest.raises(UserError, match=r"^checkpoint\.export_dir: .* cannot be written \(.*; choose a directory"):
        helpers.checkpoints_of(tmp_path / "run", export_dir=export_dir)
    helpers.checkpoints_of(tmp_path / "run", export_dir=export_dir, export_hf="never")


def test_an_export_directory_is_not_made_before_the_export(tmp_path: Path) -> None:
    helpers.checkpoints_of(tmp_path / "run", export_dir=str(tmp_path / "new" / "hf"))
    assert list((tmp_path / "new").iterdir()) == []


def adamw_of_some(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """As with `model.freeze` of one parameter."""
    model.model.embed_tokens.weight.requires_grad_(False)
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])


@pytest.mark.parametrize("is_frozen", [True, False])
def test_other_frozen_parameters_are_refused_by_their_key(tmp_path: Path, is_frozen: bool) -> None:
    before, after = (helpers.adamw, adamw_of_some) if is_frozen else (adamw_of_some, helpers.adamw)
    model, other = helpers.tiny_llama(), helpers.tiny_llama(seed=1)
    path = helpers.checkpoints_of(tmp_path, model, before(model)).save(helpers.progress_at(1))
    where = "the checkpoint and not in this run" if is_frozen else "this run and not in the checkpoint"
    way = rf"set model\.freeze .*run\.dir .*model\.weights = '{path}'"
    with pytest.raises(UserError, match=rf"embed_tokens\.weight\.exp_avg is in {where}: .*\(3 such .*; {way}"):
        helpers.checkpoints_of(tmp_path, other, after(other)).restore(path)
    load_weights(path, other)  # the way that is named
    assert torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_another_optimizer_is_refused_by_what_it_keeps(tmp_path: Path) -> None:
    model, other = helpers.tiny_llama(), helpers.tiny_llama(seed=1)
    path = helpers.checkpoints_of(tmp_path, model).save(helpers.progress_at(1))
    sgd = torch.optim.SGD(other.parameters(), momentum=0.9)
    kept = r"exp_avg, exp_avg_sq, step and momentum_buffer of model\.embed_tokens\.weight"
    with pytest.raises(UserError, match=rf"optimizers differ, which keep {kept} .*; use the optimizer .*run\.dir"):
        helpers.checkpoints_of(tmp_path, other, sgd).restore(path)
    path = helpers.checkpoints_of(tmp_path, model, torch.optim.SGD(model.parameters())).save(helpers.progress_at(1))
    with pytest.raises(UserError, match=r"\.exp_avg is in this run .*: the other keeps no optimizer state at all"):
        helpers.checkpoints_of(tmp_path, other).restore(path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_another_storage_dtype_is_refused_by_its_key(tmp_path: Path, stored: torch.dtype) -> None:
    current = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[stored]
    model, other = helpers.tiny_llama(), helpers.tiny_llama(seed=1)
    for one, dtype in ((model, stored), (other, current)):
        for parameter in one.parameters():
            parameter.data = parameter.data.to(dtype)
    path = helpers.checkpoints_of(tmp_path, model).save(helpers.progress_at(1))
    keys = (
        r"fsdp\.storage_dtype, fsdp\.ignored_modules and \(for those\) fsdp\.param_dtype .*run\.dir .*model\.weights"
    )
    with pytest.raises(UserError, match=rf"is {stored} in the checkpoint and {current} in the run; set {keys}"):
        helpers.checkpoints_of(tmp_path, other).restore(path)
    load_weights(path, other)  # the way that is named
    assert torch.equal(other.model.norm.weight, model.model.norm.weight.to(current))


def test_a_failed_save_fails_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    for message in pool.run(2, helpers.save_without_assets, tmp_path):
        assert "step-000001: the checkpoint was not saved" in message
        assert "No space left" in message
    assert names(tmp_path) == []


def test_a_save_that_dcp_cannot_write_is_a_run_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full disk again, where no disk can be mounted: the storage writer fails in the middle."""
    checkpoints, path = saved_alone(tmp_path, 1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", fail)
    with pytest.raises(RunFailure, match=r"step-000002: the checkpoint was not saved: rank 0 on .*: .*No space"):
        checkpoints.save(helpers.progress_at(2))
    assert names(tmp_path) == ["step-000001"]
    assert "whole" in verify(path)


def test_a_save_that_waited_for_a_lost_rank_does_not_blame_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = saved_alone(tmp_path, 1)

    def fail(*_: object) -> None:
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms")

    monkeypatch.setattr("fsdp2kit.checkpoint.checkpoints.record_files", fail)
    with pytest.raises(RunFailure, match=r"see why a rank ended .* it resumes from step-000001") as failure:
        checkpoints.save(helpers.progress_at(2))
    assert "free space" not in str(failure.value)


def empty_checkpoint(store: CheckpointStore, step: int) -> Path:
    store.path(step).mkdir(parents=True)
    (store.path(step) / "manifest.json").write_text("{}")
    return store.path(step)


def test_checkpoints_are_ordered_by_number_and_others_are_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.published() == CheckpointStore(tmp_path / "missing").published() == []
    for step in (1_000_000, 999_999, 20):
        empty_checkpoint(store, step)
    for name in ("step-12", "step-0000200x", "superseded-step-000030", ".trash-step-000040"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000050").touch()
    (tmp_path / "step-000060").mkdir()
    assert [step for step, _ in store.published()] == [20, 60, 999_999, 1_000_000]
    assert [path.name for _, path in store.complete()] == ["step-000020", "step-999999", "step-1000000"]
    store.retain(1)
    assert [step for step, _ in store.complete()] == [1_000_000]


def test_what_is_set_aside_or_thrown_away_replaces_nothing(tmp_path: Path) -> None:
    """The same step may be superseded, thrown away and cut short again and again."""
    store = CheckpointStore(tmp_path)
    for attempt in (1, 2, 3):
        (empty_checkpoint(store, 7) / f"of attempt {attempt}").touch()
        store._set_superseded_aside(6)
        empty_checkpoint(store, 5)
        store.temporary(5).mkdir()
        store.recover()
        store._throw_away(store.path(5))
    aside = ["superseded-step-000007", "superseded-step-000007-2", "superseded-step-000007-3"]
    assert [path.name for path in sorted(tmp_path.glob("superseded-*"))] == aside
    assert (tmp_path / aside[2] / "of attempt 3").exists()
    assert len(store._trash()) == 6
    store.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == aside


def test_a_sweep_goes_on_after_what_it_cannot_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, delete = CheckpointStore(tmp_path), shutil.rmtree
    for name in ("a", "b"):
        (tmp_path / f".trash-{name}").mkdir()
    first, second = store._trash()
    monkeypatch.setattr(shutil, "rmtree", lambda path: 1 / 0 if path == first else delete(path))
    store.sweep()
    assert (first.exists(), second.exists()) == (True, False)
    assert f"{first}: an old checkpoint was not deleted" in caplog.text


def test_the_older_one_comes_back_only_where_the_newer_is_not_whole(tmp_path: Path) -> None:
    """Between the two renames of a replacement, after it, and where a directory without a manifest has the name."""
    for is_complete in (None, False, True):
        store = CheckpointStore(tmp_path / str(is_complete))
        (empty_checkpoint(store, 3) / "old").touch()
        store.path(3).rename(store.root / ".old-step-000003")
        if is_complete is not None:
            (empty_checkpoint(store, 3) / "new").touch()
        if is_complete is False:
            (store.path(3) / "manifest.json").unlink()
        store.recover()
        assert (store.path(3) / ("new" if is_complete else "old")).exists()
        assert [step for step, _ in store.complete()] == [3]


@pytest.mark.parametrize(
    ("stored", "tied", "smaller", "expected"),
    [
        (["model.a", "model.b"], {}, {}, {"a": "model.a", "b": "model.b"}),
        (["a", "b", "optimizer.state.a.step"], {}, {}, {"a": "a", "b": "b"}),
        (["model.a", "model.b", "optimizer.x", "other.y"], {}, {}, {"a": "model.a", "b": "model.b"}),
        (["model.alias", "model.b"], {"alias": "a"}, {}, {"a": "model.alias", "b": "model.b"}),
        (["a", "alias", "b"], {"alias": "a"}, {}, {"a": "a", "b": "b"}),
        (["a", "b"], {}, {"a": torch.Size([2])}, None),
        (["a"], {}, {}, "has no tensor b (1 missing in all)"),
        (["model.a", "model.b", "model.c"], {}, {}, "holds model.c, which the model has not"),
        (["a", "b", "c"], {}, {}, "holds c, which the model has not"),
        (["a", "alias", "b"], {}, {}, "holds alias, which the model has not"),
    ],
)
def test_tensors_are_found_under_any_prefix_and_others_are_refused(
    stored: list[str], tied: dict, smaller: dict, expected: Any
) -> None:
    """All have three elements; ``smaller`` may also have its own number of them, which these keys have not."""
    shapes = {key: torch.Size([3]) for key in stored}
    tensors = {name: torch.zeros(3) for name in ("a", "b")}

    def find() -> dict[str, str]:
        return find_weights(Path("x"), shapes, tensors, tied=tied, smaller=smaller)

    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            find()
    else:
        assert find() == (expected or {"a": "a", "b": "b"})
    for name, size in smaller.items():
        shapes[name] = size
        assert find() == {"a": "a", "b": "b"}
        shapes["b"] = size
        with pytest.raises(UserError, match=r"x: b: has shape \(2,\) in the checkpoint and \(3,\) in the model"):
            find()


def test_progress_of_an_older_version_is_read_and_of_a_newer_one_refused(tmp_path: Path) -> None:
    _, path = saved_alone(tmp_path, 1)
    manifest = read_manifest(path)
    known = manifest.progress
    before = replace(manifest, progress={name: known[name] for name in known if name != "unevaluated"})
    assert read_progress(path, before) == helpers.progress_at(1)
    with pytest.raises(UserError, match="another kind of progress: later is not in both"):
        read_progress(path, replace(manifest, progress={**known, "later": 1}))


def test_only_the_best_of_this_very_history_is_held_for_it(tmp_path: Path) -> None:
    checkpoints, _ = saved_alone(tmp_path)
    best = replace(helpers.progress_at(2), best_step=2, best_eval_loss=1.5)
    path = checkpoints.save(best)
    assert holds_best(path, replace(best, step=9))
    assert not holds_best(path, replace(best, best_eval_loss=1.25))
    assert not holds_best(path.with_name("step-000003"), best)
    (path / "manifest.json").write_text("{")
    assert not holds_best(path, best)


@pytest.mark.parametrize("sizes", [[1, 1, 10], [4, 8], [3, 0, 9], [12], [2, 2, 2, 2, 2, 2], [5, 5, 2]])
def test_blocks_of_any_size_become_rows(sizes: list[int]) -> None:
    table = torch.arange(12.0).view(4, 3)
    blocks = [*_whole_rows(table.flatten().split(sizes), torch.Size([4, 3]))]
    assert all(block.shape[1:] == (3,) for block in blocks)
    assert torch.equal(torch.cat(blocks), table)
