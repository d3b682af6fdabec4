"""Checkpoints behind fsspec URLs: saved, resumed, converted and checked, without renames, syncs or locks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from transformers import AutoModelForCausalLM
from upath import UPath

from fsdp2kit.checkpoint import store
from fsdp2kit.checkpoint.__main__ import main
from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import plan_export
from fsdp2kit.checkpoint.hf import dcp_to_hf, ensure_export, write_files
from fsdp2kit.checkpoint.manifest import MANIFEST
from fsdp2kit.checkpoint.source import open_source
from fsdp2kit.checkpoint.state import load_weights
from fsdp2kit.checkpoint.store import open_store
from fsdp2kit.errors import RunFailure, StorageFailure, UserError
from fsdp2kit.files.remote import check_writable, on_disk, to_path
from tests.checkpoint import helpers
from tests.checkpoint.helpers import assert_same, exported, saved_alone, tool
from tests.support.models import full
from tests.support.workers import WorkerPool


@pytest.fixture
def url() -> str:
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)
    return "memory://bucket/run"


def names(url: str) -> list[str]:
    return sorted(path.name for path in UPath(url).iterdir())


def test_a_protocol_that_only_reads_is_refused() -> None:
    with pytest.raises(UserError, match=r"^checkpoint\.dir: http://localhost:1/x cannot be written"):
        check_writable(to_path("http://localhost:1/x"), where="checkpoint.dir")


@pytest.mark.parametrize("is_async", [False, True])
def test_saved_resumed_and_retained(tmp_path: Path, url: str, is_async: bool) -> None:
    _, path = saved_alone(tmp_path, 1, 2, 3, 4, keep=1, keep_every=2, async_save=is_async, dir=url)
    assert names(url) == ["step-000002", "step-000004"]
    assert not (tmp_path / "checkpoints").exists()
    model = helpers.tiny_llama(seed=1)
    optimizer = helpers.adamw(model)
    resumed = helpers.checkpoints_of(tmp_path, model, optimizer, dir=url)
    assert resumed.resolve("auto") == path == resumed.resolve(f"{url}/step-000004")
    assert resumed.restore(path) == helpers.progress_at(4)
    reference = helpers.tiny_llama()
    assert_same(helpers.full_state(model, optimizer), helpers.full_state(reference, helpers.adamw(reference)))


def test_converted_checked_and_started_from(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = saved_alone(tmp_path, 1, dir=url)
    assert main(["verify", f"{url}/step-000001"]) == 0
    assert "whole: step 1" in capsys.readouterr().out
    dcp_to_hf(path, tmp_path / "out", dtype="float32")
    model = helpers.tiny_llama()
    assert all((exported(tmp_path / "out")[name] == p.detach()).all() for name, p in model.named_parameters())
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    loaded = helpers.tiny_llama(seed=1)
    load_weights(path, loaded)
    assert all((p == q).all() for p, q in zip(loaded.parameters(), model.parameters(), strict=True))
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[-1] ^= 1
    (path / "__0_0.distcp").write_bytes(bytes(content))
    assert main(["verify", f"{url}/step-000001"]) == 2
    assert "__0_0.distcp: does not have the checksum" in capsys.readouterr().err


def test_exported_to_a_url(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = saved_alone(tmp_path, 1, dir=f"{url}/checkpoints")
    out: Any = UPath(f"{url}/hf")
    arguments = [str(path), str(out), "--dtype", "float32"]
    assert tool("dcp_to_hf").main([*arguments, "--max-shard-gb", "0.00001", "--verify"]) == 0
    assert "gives the same logits" in capsys.readouterr().out
    several = names(f"{url}/hf")
    assert "model.safetensors.index.json" in several
    assert "chat_template.jinja" in several
    assert tool("dcp_to_hf").main(arguments) == 0  # what is left of the first is gone
    assert [name for name in names(f"{url}/hf") if "model" in name] == ["model.safetensors"]
    with on_disk(out) as folder:
        model, loaded = helpers.tiny_llama(), AutoModelForCausalLM.from_pretrained(folder)
    assert all((p == q).all() for p, q in zip(loaded.parameters(), model.parameters(), strict=True))
    (out / "notes.txt").write_text("mine")
    assert tool("dcp_to_hf").main(arguments) == 2
    assert "hf: holds notes.txt, which no export of fsdp2kit wrote" in capsys.readouterr().err
    assert (out / "notes.txt").read_text() == "mine"


def test_an_export_to_a_url_that_was_cut_short_is_made_again(tmp_path: Path, url: str) -> None:
    _, path = saved_alone(tmp_path, 1, dir=f"{url}/checkpoints")
    out: Any = UPath(f"{url}/hf")
    assert ensure_export(path, out=out, dtype="float32")
    assert not ensure_export(path, out=out, dtype="float32")
    directory = ExportDirectory(out)
    with open_source(path, _assets(tmp_path / "assets")) as source:
        plan = plan_export(source, dtype="float32", max_shard_bytes=8000)
        directory.begin(plan)
        write_files(plan, directory.staging, rank=0, world_size=2)
        with pytest.raises(RunFailure, match=r"model-00002-of-.*: was not written, or not whole"):
            directory.publish(plan)
    assert len(names(f"{url}/hf")) > 6  # the first export's files, and half of the second's
    assert ensure_export(path, out=out, dtype="float32")
    expected = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", ".fsdp2kit-export.json"}
    assert set(names(f"{url}/hf")) == expected
    assert not ensure_export(path, out=out, dtype="float32")


def _assets(folder: Path) -> Path:
    folder.mkdir()
    helpers.write_assets(folder)
    return folder


def test_a_save_begins_with_its_mark_and_ends_with_its_manifest(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no rename that makes a checkpoint appear, so the order of the writes is what a crash meets."""
    written = []
    original = MemoryFileSystem._open

    def recorded(self: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        if "r" not in mode and "/step-000001/" in path:
            written.append(path.partition("/step-000001/")[2])
        return original(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", recorded)
    saved_alone(tmp_path, 1, dir=url)
    assert (written[0], written[-1]) == (".begun", "manifest.json")
    assert {"__0_0.distcp", "hf/config.json"} < set(written)
    assert len(written) == len(set(written))


class Unreachable(Exception):
    """As the client of a store would raise it."""

    __module__ = "botocore.exceptions"


@pytest.mark.parametrize("raised", [Unreachable, ConnectionError])
@pytest.mark.parametrize("where", ["/step-000002/.begun", "/step-000002/__0_0.distcp", "/step-000002/manifest.json"])
def test_a_store_that_fails_ends_the_save_in_one_line(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, raised: type[Exception], where: str
) -> None:
    checkpoints = helpers.checkpoints_of(tmp_path, dir=url)
    checkpoints.save(helpers.progress_at(1))
    original = MemoryFileSystem._open

    def fails(self: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        if "r" not in mode and path.endswith(where):
            raise raised("503")
        return original(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", fails)
    with pytest.raises(StorageFailure) as failure:
        checkpoints.save(helpers.progress_at(2))
    todo = "see that the store can be reached and written to, and start the run again: it resumes from step-000001"
    assert str(failure.value).startswith(f"{url}/step-000002: the checkpoint was not saved: ")
    assert str(failure.value).endswith(f"503; {todo}")


def test_what_a_crash_leaves_is_cleared_and_what_is_not_ours_is_not(tmp_path: Path, url: str) -> None:
    _, path = saved_alone(tmp_path, 1, 2, dir=url)
    (path / "manifest.json").unlink()  # as a kill leaves it
    resumed = helpers.checkpoints_of(tmp_path, dir=url)
    assert str(resumed.resolve("auto")).endswith("step-000001")
    resumed.finish()
    assert names(url) == ["step-000001"]
    (UPath(url) / "step-000003").mkdir()
    (UPath(url) / "step-000003" / "mine.txt").write_text("mine")
    with pytest.raises(RunFailure, match="step-000003: holds files that no save left there"):
        resumed.save(helpers.progress_at(3))
    assert (UPath(url) / "step-000003" / "mine.txt").read_text() == "mine"


def test_going_back_sets_later_checkpoints_aside(tmp_path: Path, url: str) -> None:
    _, path = saved_alone(tmp_path, 1, 2, keep=5, dir=url)
    checkpoints = helpers.checkpoints_of(tmp_path, dir=url, keep=5)
    checkpoints.restore(path.parent / "step-000001")
    checkpoints.save(helpers.progress_at(2))
    assert names(url) == ["step-000001", "step-000002", "superseded-step-000002"]
    assert main(["verify", f"{url}/superseded-step-000002"]) == 0
    assert main(["verify", f"{url}/step-000002"]) == 0


@pytest.mark.parametrize(("text", "says"), [("nonsense://x/y", "nonsense"), ("s3://bucket/x", "s3")])
def test_urls_that_cannot_be_used_are_refused(text: str, says: str) -> None:
    if says == "s3":
        pytest.importorskip("upath")
        try:
            import s3fs  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("s3fs is installed here")
    with pytest.raises(UserError, match=says):
        to_path(text)


class Bucket(LocalFileSystem):
    """An object store that several processes share: what is written to it lies in a folder."""

    protocol = "bucket"

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        path = str(path).removeprefix("bucket://")
        return path if path.startswith("/") else f"{os.environ['FSDP2KIT_TEST_BUCKET']}/{path}".rstrip("/")


def save_export_and_resume(bucket: Path, is_async: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The state that was saved last and exported, and the state of a resumed run."""
    os.environ["FSDP2KIT_TEST_BUCKET"] = str(bucket)
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    section = {"dir": "bucket://run", "export_dir": "bucket://model", "async_save": is_async, "export_hf": "final"}
    model = helpers.sharded(helpers.tiny_llama())
    optimizer = helpers.adamw(model)
    with helpers.checkpoints_of(bucket / "local", model, optimizer, **section) as checkpoints:
        checkpoints.save(helpers.progress_at(1))
        checkpoints.finish_save()
        assert not (bucket / "model").exists()
        helpers.train(model, optimizer, range(2))
        path = checkpoints.save(helpers.progress_at(2), is_over=True)
    before = helpers.full_state(model, optimizer)
    dist.barrier()
    model = helpers.sharded(helpers.tiny_llama(seed=1))
    optimizer = helpers.adamw(model)
    checkpoints = helpers.checkpoints_of(bucket / "local", model, optimizer, **section)
    assert checkpoints.resolve("auto") == path
    checkpoints.restore(path)
    return before, helpers.full_state(model, optimizer)


@pytest.mark.parametrize("is_async", [full(False), True])
def test_a_run_saves_to_a_store_exports_to_one_and_resumes(pool: WorkerPool, tmp_path: Path, is_async: bool) -> None:
    results = pool.run(2, save_export_and_resume, tmp_path, is_async)
    for before, after in results:
        assert_same(before, after)
    assert (tmp_path / "run" / "step-000002" / "__1_0.distcp").is_file()
    assert not (tmp_path / "local" / "hf").exists()
    record = json.loads((tmp_path / "model" / ".fsdp2kit-export.json").read_text())
    assert (record["step"], record["dtype"]) == (2, "bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(results[0][0][name]).bfloat16()), name


def test_a_sweep_deletes_only_what_was_thrown_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may hide a manifest for a moment; what it belongs to stays."""
    writer = open_store(to_path(url))
    for step in (1, 2):
        writer.begin(step, after=step - 1)
        (writer.temporary(step) / MANIFEST).write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(store, "is_complete", lambda path: False)
        writer.sweep()
    assert [step for step, _ in writer.complete()] == [1, 2]
    writer.retain(1)
    writer.sweep()
    assert [step for step, _ in writer.published()] == [2]
