"""Every part of every tensor is planned once among all ranks, about as many bytes on each, and DCP reads it back."""

from __future__ import annotations

import errno
import gc
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from fsdp2kit.checkpoint import save_plan
from fsdp2kit.checkpoint.reader import SafeReader, first_failure
from fsdp2kit.checkpoint.save_plan import BriefWriter, SharedSavePlanner, Written, share_out
from fsdp2kit.checkpoint.state import fill_weights, model_tensors, optimizer_tensors, save_tensors
from fsdp2kit.job.distributed import World, gather_objects
from fsdp2kit.job.layout import node_names
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from tests.checkpoint import helpers
from tests.support.models import full
from tests.support.workers import WorkerPool
from tools.benchmarks.sides import bench_config

TINY = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
Items = list[tuple[str, tuple[int, ...], int]]


def state(*, replicate: int) -> dict[str, dict[str, Tensor]]:
    """A trained model and its optimizer, and a table that is not sharded."""
    model = helpers.sharded(helpers.tiny_llama(), replicate=replicate)
    optimizer = helpers.adamw(model)
    helpers.train(model, optimizer, range(1))
    whole = {"table": torch.arange(40.0).view(8, 5)}
    return {"model": model_tensors(model) | whole, "optimizer": optimizer_tensors(model, optimizer)}


def plan_and_save(folder: Path, replicate: int) -> tuple[Items, Items, bool]:
    """What this rank plans to write, what DCP's own planner would, and whether a load gives back what was saved."""
    tensors, plans = state(replicate=replicate), []
    own = SharedSavePlanner(rank=dist.get_rank(), world_size=dist.get_world_size())
    for planner in (own, dcp.DefaultSavePlanner()):
        planner.set_up_planner(tensors, is_coordinator=dist.get_rank() == 0)
        planner.create_local_plan()
        items = planner.plan.items
        sizes = [(item, item.tensor_data) for item in items]
        assert all(data is not None for _, data in sizes)
        plans.append(
            [
                (item.index.fqn, tuple(item.index.offset or ()), data.chunk.sizes.numel())
                for item, data in sizes
                if data is not None
            ]
        )
    save_tensors(tensors, folder)
    read = {part: {name: torch.zeros_like(one) for name, one in named.items()} for part, named in tensors.items()}
    dcp.load(read, checkpoint_id=folder)
    same = [
        torch.equal(_local(one), _local(read[part][name])) for part in tensors for name, one in tensors[part].items()
    ]
    return *plans, all(same)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportCallIssue]


@pytest.mark.full
@pytest.mark.parametrize("replicate", [1, 2])
def test_each_part_is_planned_by_one_of_its_holders(replicate: int, pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(4, plan_and_save, tmp_path / "saved", replicate)
    parts = Counter((name, offset) for own, _, _ in found for name, offset, _ in own)
    assert set(parts.values()) == {1}
    assert parts.keys() == {(name, offset) for _, whole, _ in found for name, offset, _ in whole}
    assert all(same for *_, same in found)
    for own, whole, _ in found:
        assert set(own) <= set(whole)
    written = [sum(size for *_, size in own) for own, _, _ in found]
    assert max(written) - min(written) <= max(size for _, whole, _ in found for *_, size in whole)
    metadata = FileSystemReader(tmp_path / "saved").read_metadata()
    assert metadata.planner_data.keys() == metadata.state_dict_metadata.keys()


def test_no_garbage_is_collected_while_metadata_are_written_or_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    original = dcp.FileSystemWriter.finish

    def looking(writer: dcp.FileSystemWriter, metadata: Any, results: Any) -> Any:
        seen.append(gc.isenabled())
        return 1 / 0 if len(seen) > 1 else original(writer, metadata, results)

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", looking)
    save_tensors({"model": {"one": torch.ones(1)}}, tmp_path / "x", alone=True)
    assert gc.isenabled()
    with pytest.raises(dcp.CheckpointException):
        save_tensors({"model": {"one": torch.ones(1)}}, tmp_path / "y", alone=True)
    assert gc.isenabled()
    assert seen == [False, False]


class _SendsAll(SharedSavePlanner):
    """Sends rank 0 every item, as DCP's own planner does, which then plans for all."""

    def create_local_plan(self) -> SavePlan:
        sent = super().create_local_plan()
        return replace(sent, items=self.plan.items, planner_data=self.mappings)

    create_global_plan = dcp.DefaultSavePlanner.create_global_plan
    finish_plan = dcp.DefaultSavePlanner.finish_plan


def _job_tensors(sections: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a save of a tiny Llama whose vocabulary is a multiple of no number of ranks."""
    config = bench_config({"model": {"weights": "random", "config": TINY}, **sections})
    size, own = dist.get_world_size(), dist.get_rank()
    world = World(own, size, own, size, torch.device("cpu"), node_names(size, size))
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    model: Any = build_model(config.model, lora=config.lora)
    parallelize_model(model, plan_parallel(model, config, mesh.sizes, "cpu"), mesh=mesh)
    fill_weights(config.model, model, seed=0)
    optimizer = build_optimizer(config.optimizer, model)
    return {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}


def _save_in_three_ways(folder: Path, sections: dict[str, Any]) -> tuple[int, int]:
    """Our save, one that sends all items, and torch's own: how many items this rank sent in the first two."""
    tensors = _job_tensors(sections)
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    ours, whole = SharedSavePlanner(**ranks), _SendsAll(**ranks)
    save_tensors(tensors, folder / "ours", planner=ours)
    for name, planner in (("all", whole), ("torch", dcp.DefaultSavePlanner())):
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder / name), planner=planner)
    read = {part: {name: torch.zeros_like(one) for name, one in named.items()} for part, named in tensors.items()}
    dcp.load(read, checkpoint_id=folder / "ours")
    for part, named in tensors.items():
        assert all(torch.equal(_local(one), _local(read[part][name])) for name, one in named.items())
    return len(ours.create_local_plan().items), len(whole.create_local_plan().items)


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (4, {"fsdp": {"strategy": "full_shard"}, "mesh": {"cp": 2}}),
        full(3, {"fsdp": {"strategy": "full_shard"}, "lora": {"rank": 4}}),
        full(4, {"fsdp": {"strategy": "hybrid_shard"}, "mesh": {"dp_replicate": 2}}),
        full(2, {"fsdp": {"strategy": "no_shard"}}),
        full(2, {"fsdp": {"strategy": "full_shard"}, "optimizer": {"name": "adamw_8bit"}}),
    ],
    ids=["cp", "uneven adapters", "hybrid", "not sharded", "8 bits"],
)
def test_the_metadata_are_those_of_dcp(ranks: int, sections: dict[str, Any], pool: WorkerPool, tmp_path: Path) -> None:
    if "optimizer" in sections:
        pytest.importorskip("torchao")
    sent = pool.run(ranks, _save_in_three_ways, tmp_path, sections)
    ours, whole, torchs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "all", "torch"))
    assert replace(ours, storage_meta=None) == replace(whole, storage_meta=None)
    safely = SafeReader(tmp_path / "ours").read_metadata()
    assert replace(ours, storage_meta=None) == replace(safely, storage_meta=None)
    # torch's own planner gives what several ranks hold to others of them, so parts are in another order.
    assert _in_order(ours) == _in_order(torchs)
    assert any(name.endswith(".codes") for name in ours.state_dict_metadata) is ("optimizer" in sections)
    assert ours.planner_data == torchs.planner_data
    assert ours.storage_data.keys() == torchs.storage_data.keys()
    assert sum(few for few, _ in sent) < sum(many for _, many in sent)
    assert (tmp_path / "ours" / ".metadata").stat().st_size < (tmp_path / "all" / ".metadata").stat().st_size


def _in_order(metadata: Metadata) -> dict[str, Any]:
    """The tensors' metadata, with chunks in order of place."""
    tensors: dict[str, Any] = metadata.state_dict_metadata
    return {
        name: replace(one, chunks=sorted(one.chunks, key=lambda chunk: chunk.offsets)) for name, one in tensors.items()
    }


def _save_what_differs(folder: Path) -> str:
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    with pytest.raises(dcp.CheckpointException) as failure:
        save_tensors({"model": {"one": torch.ones(3, dtype=dtype)}}, folder)
    return first_failure(failure.value)


def test_a_rank_with_other_tensors_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    for error in pool.run(2, _save_what_differs, tmp_path):
        assert "rank 1 on " in error
        assert error.endswith("has other tensors than rank 0, or other shards")


def test_places_stay_on_rank_0(tmp_path: Path) -> None:
    """DCP sends to all ranks what it gave to `finish`."""
    metadata = Metadata({"t": TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])})
    written = Written("__0_0.distcp", torch.Size([0]), array("q", [0]), array("q", [7]), array("q", [9]))
    BriefWriter(tmp_path).finish(metadata, [[written]])
    assert metadata.storage_data is None
    ((index, place),) = FileSystemReader(tmp_path).read_metadata().storage_data.items()
    assert index == MetadataIndex("t", (0,))
    assert (place.relative_path, place.offset, place.length) == ("__0_0.distcp", 7, 9)


class Refusing(dcp.FileSystemWriter):
    """Fails as torch.save does where a disk is full just before the end of a file."""

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


class BriefRefusing(save_plan._WritesBriefly, Refusing):
    """As `BriefWriter`."""


def test_a_full_disk_is_named_though_torch_hides_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        BriefRefusing(tmp_path).write_data(SavePlan([]), None)


def test_bytes_are_shared_out_evenly() -> None:
    """Into the least loaded, the largest first: the loads differ by no more than the last tensor of the fullest."""
    sizes = [(number * number, f"t{number}") for number in range(1, 60)]
    holders = share_out(reversed(sizes), 7)
    assert holders == share_out(sizes, 7), "in whatever order a rank lists them"
    loads = Counter({holders[name]: 0 for _, name in sizes})
    for size, name in sizes:
        loads[holders[name]] += size
    assert sum(loads.values()) == sum(size for size, _ in sizes)
    assert len(loads) == 7
    assert max(loads.values()) - min(loads.values()) < 0.1 * max(loads.values())


def _names_agree() -> bool:
    """A save within a group of some ranks is theirs alone."""
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return True
    planner = SharedSavePlanner(rank=dist.get_rank(group), world_size=dist.get_world_size(group))
    planner.set_up_planner({f"t{n}": torch.ones(n) for n in range(1, 9)}, is_coordinator=False)
    planner.create_local_plan()
    names = [item.index.fqn for item in planner.plan.items]
    return sorted(name for one in gather_objects(names, group=group) for name in one) == [f"t{n}" for n in range(1, 9)]


def test_tensors_that_are_not_sharded_are_divided_over_ranks(pool: WorkerPool) -> None:
    assert all(pool.run(4, _names_agree))
