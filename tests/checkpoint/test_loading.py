"""Weights from other checkpoints, ours read by others, and pickles that are not to be trusted."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.reader import SafeReader, load_tensors
from fsdp2kit.checkpoint.state import load_weights
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.remote import to_path
from tests.checkpoint import helpers
from tests.support.workers import WorkerPool

# Plain torch says so each time it works without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:torch.distributed is unavail")


def weights_equal(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_plain_torch_reads_our_checkpoints(tmp_path: Path) -> None:
    model = helpers.tiny_llama()
    path = helpers.checkpoints_of(tmp_path, model).save(helpers.progress_at(1))

    state = helpers.tiny_llama(seed=1).state_dict()
    del state["lm_head.weight"]  # tied, so it is stored once
    dcp.load({"model": state}, checkpoint_id=path)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())

    dcp_to_torch_save(path, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt")
    helpers.tiny_llama().load_state_dict(
        {**whole["model"], "lm_head.weight": whole["model"]["model.embed_tokens.weight"]}
    )
    assert set(whole["optimizer"]) == {
        f"state.{name}.{field}" for name, _ in model.named_parameters() for field in ("step", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("form", ["ours", "bare", "prefixed", "head only"])
def test_weights_are_found_however_they_were_saved(pool: WorkerPool, tmp_path: Path, form: str) -> None:
    model, path = helpers.tiny_llama(), tmp_path / "weights"
    if form == "ours":
        path = helpers.checkpoints_of(tmp_path, model).save(helpers.progress_at(1))
    else:
        state: dict = dict(model.state_dict())
        if form == "head only":
            del state["model.embed_tokens.weight"]
        dcp.save({"model": state, "lr": 0.1} if form == "prefixed" else state, checkpoint_id=path)
    loaded = helpers.tiny_llama(seed=1)
    load_weights(path, loaded)
    assert weights_equal(loaded, model)
    if form == "bare":
        for state in pool.run(2, helpers.load_weights_sharded, path):
            assert all((model.state_dict()[name].numpy() == array).all() for name, array in state.items())


def test_weights_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    model = helpers.tiny_llama().bfloat16()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "weights")
    loaded = helpers.tiny_llama(seed=1)
    load_weights(tmp_path / "weights", loaded)
    assert weights_equal(loaded, model.float())


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    state = helpers.tiny_llama().state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "whole")
    with pytest.raises(UserError, match=r"embed_tokens.weight: has shape \(97, 16\)"):
        load_weights(tmp_path / "whole", helpers.tiny_llama(hidden=8))
    dcp.save({**state, "model.extra": torch.zeros(1)}, checkpoint_id=tmp_path / "more")
    with pytest.raises(UserError, match=r"holds model\.extra, which the model has not"):
        load_weights(tmp_path / "more", helpers.tiny_llama())
    del state["model.norm.weight"]
    dcp.save(state, checkpoint_id=tmp_path / "less")
    with pytest.raises(UserError, match=r"has no tensor model\.norm\.weight"):
        load_weights(tmp_path / "less", helpers.tiny_llama())
    with pytest.raises(UserError, match=r"\.metadata: is missing"):
        load_weights(tmp_path / "nothing", helpers.tiny_llama())


def test_weights_of_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    model = helpers.tiny_llama()
    path = helpers.checkpoints_of(tmp_path, model).save(helpers.progress_at(1))
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"__0_0\.distcp: does not have the checksum"):
        load_weights(path, helpers.tiny_llama(seed=1))


class _RunsACommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class _ReachesForGlobals:
    """getattr(Metadata, "__init__"), the first link of a chain to the builtins."""

    def __reduce__(self):
        return getattr, (dcp.Metadata, "__init__")


@pytest.mark.parametrize("kind", ["command", "getattr", "class", "garbage"])
def test_a_malicious_metadata_file_is_refused(tmp_path: Path, kind: str) -> None:
    witness = tmp_path / "witness"
    content = {
        "command": pickle.dumps(_RunsACommand(f"touch {witness}")),
        "getattr": pickle.dumps(_ReachesForGlobals()),
        "class": pickle.dumps(dcp.FileSystemWriter),
        "garbage": b"not a pickle",
    }[kind]
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata: "):
        SafeReader(tmp_path).read_metadata()
    assert not witness.exists()


def test_metadata_that_leads_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    dcp.save({"x": torch.zeros(2)}, checkpoint_id=tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="elsewhere, which is not a file of the checkpoint"):
        SafeReader(tmp_path).read_metadata()


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    dcp.save({"x": torch.ones(2), "object": _RunsACommand(f"touch {witness}")}, checkpoint_id=tmp_path / "c")
    tensor = torch.zeros(2)
    load_tensors(SafeReader(tmp_path / "c"), {"x": tensor})
    assert tensor.tolist() == [1, 1]
    with pytest.raises(RunFailure, match="pickled object"):
        load_tensors(SafeReader(tmp_path / "c"), {"object": 0})  # type: ignore[dict-item]
    assert not witness.exists()


@pytest.mark.parametrize("where", ["the disk", "a store"])
def test_a_pickle_in_place_of_a_tensor_is_not_executed(tmp_path: Path, where: str) -> None:
    """On every way into a checkpoint without checksums: weights, conversion, and both from a URL."""
    witness, path = tmp_path / "witness", tmp_path / "weights"
    model = helpers.tiny_llama()
    dcp.save(model.state_dict(), checkpoint_id=path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    torch.save(_RunsACommand(f"touch {witness}"), path / "__9_0.distcp")
    index = next(index for index in metadata.storage_data if index.fqn == "model.norm.weight")
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "__9_0.distcp", 0, (path / "__9_0.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    model.save_pretrained(tmp_path / "hf")
    place = path
    if where == "a store":
        place = to_path("memory://pickles/weights")
        place.mkdir(parents=True, exist_ok=True)
        for file in path.iterdir():
            (place / file.name).write_bytes(file.read_bytes())
    with pytest.raises(RunFailure, match="Weights only load failed"):
        load_weights(place, helpers.tiny_llama(seed=1))
    with pytest.raises(RunFailure, match="Weights only load failed"):
        dcp_to_hf(place, tmp_path / "out", config_dir=tmp_path / "hf")
    assert not witness.exists()
