"""Tensors read in blocks out of checkpoint files, against the tensors that plain torch saved."""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp2kit.checkpoint import reader
from fsdp2kit.checkpoint.reader import SafeReader, StoredTensors
from fsdp2kit.errors import RunFailure
from tests.support.workers import WorkerPool
from tools.benchmarks.harness import PeakMemory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PLACEMENTS = {
    "rows": [Replicate(), Shard(0)],
    "rows of rows": [Shard(0), Shard(0)],
    "columns": [Shard(1), Replicate()],
    "both": [Shard(0), Shard(1)],
    "nobody's": [Replicate(), Replicate()],
}


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def opened(path: Path) -> StoredTensors:
    return StoredTensors(SafeReader(path))


def assert_reads(path: Path, expected: dict[str, Tensor]) -> None:
    stored = opened(path)
    for key, tensor in expected.items():
        blocks = [block.clone() for block in stored.blocks(key)]  # a block is valid until the next
        assert torch.equal(torch.cat(blocks), tensor.reshape(-1)), key
        assert stored.read(key).dtype == tensor.dtype
        assert torch.equal(stored.read(key), tensor), key


def no_dcp(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("DCP's reader was used")


def save_sharded(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    dcp.save(
        {
            f"{name}/{rows}": distribute_tensor(values((rows, 3)), mesh, placements)
            for name, placements in PLACEMENTS.items()
            for rows in (1, 5, 8)
        },
        checkpoint_id=path,
    )


def test_shards_become_whole(pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run(4, save_sharded, tmp_path / "dcp")
    expected = {f"{name}/{rows}": values((rows, 3)) for name in PLACEMENTS for rows in (1, 5, 8)}
    assert_reads(tmp_path / "dcp", expected)
    monkeypatch.setattr(reader, "load_tensors", no_dcp)
    assert_reads(
        tmp_path / "dcp", {key: tensor for key, tensor in expected.items() if key.startswith(("rows", "nob"))}
    )
    with pytest.raises(AssertionError, match="DCP's reader"):
        opened(tmp_path / "dcp").read("columns/8")


def test_every_kind_of_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "half": values((7, 3), torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "counts": values((2, 3, 5), torch.int64),
        "transposed": values((4, 6)).T,
        "part of a storage": values((9, 2))[4:6],
        "several blocks": values((100, 3)),
    }
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "dcp", no_dist=True)
    monkeypatch.setattr(reader, "load_tensors", no_dcp)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 64)
    assert_reads(tmp_path / "dcp", tensors)
    assert max(len(block) for block in opened(tmp_path / "dcp").blocks("several blocks")) == 16


def test_empty_tensors_are_read(tmp_path: Path) -> None:
    dcp.save({"empty": torch.zeros(0, 4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_reads(tmp_path / "dcp", {"empty": torch.zeros(0, 4)})


@pytest.mark.full
def test_a_large_tensor_takes_the_memory_of_a_block(tmp_path: Path) -> None:
    dcp.save({"large": torch.ones(1 << 14, 1 << 12)}, checkpoint_id=tmp_path / "dcp", no_dist=True)  # 256 MiB
    stored = opened(tmp_path / "dcp")
    with PeakMemory(torch.device("cpu")) as memory:
        assert sum(int(block.sum()) for block in stored.blocks("large")) == 1 << 26
    assert memory.peak is not None
    assert memory.peak < 3 * reader.BLOCK_BYTES


def test_what_is_not_the_announced_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dcp"
    dcp.save({"x": values((64, 64))}, checkpoint_id=path, no_dist=True)
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    for wrong in (values((64, 63)), values((64, 64), torch.float16), [values((64, 64))]):
        buffer = io.BytesIO()
        torch.save(wrong, buffer)
        file.write_bytes(buffer.getvalue().ljust(len(content), b"\0"))
        _set_place(path, length=len(buffer.getvalue()))
        with pytest.raises(RunFailure, match=r"__0_0\.distcp: cannot be read"):
            opened(path).read("x")
    _set_place(path, length=len(content))
    for size in (100, len(content) // 2, len(content) - 10):
        file.write_bytes(content[:size])
        with pytest.raises(RunFailure, match=r"__0_0\.distcp: cannot be read"):
            opened(path).read("x")


def _set_place(path: Path, **changes: Any) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    index = MetadataIndex("x", torch.Size([0, 0]))
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **changes)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_tensor_with_a_gap_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dcp"
    dcp.save({"x": values((8, 2))}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["x"].size = torch.Size([9, 2])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RunFailure, match="holds only parts of x"):
        opened(path).read("x")
