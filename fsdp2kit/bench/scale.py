"""What grows with the number of ranks: a job's start and the planning of a save, on rank 0 of a fake process group."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fsdp2kit import distributed
from fsdp2kit.bench.harness import PeakMemory
from fsdp2kit.bench.sides import bench_config
from fsdp2kit.checkpoint.save_plan import SharedSavePlanner, share_out
from fsdp2kit.checkpoint.state import model_tensors, save_tensors
from fsdp2kit.config import TrainingConfig
from fsdp2kit.distributed import World
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.layout import Layout, node_names
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.planner.estimate import plan_memory
from fsdp2kit.torch_compat import start_fake_group

NODE = 8
"""Ranks of a node."""
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
TINY = {**LLAMA_70B, "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def bench_scale(
    world: World,
    *,
    ranks: tuple[int, ...] = (8, 64, 1024),
    shards: int = 64,
    cp: int = 2,
    model: Literal["70b", "tiny"] = "70b",
) -> Iterator[dict[str, Any]]:
    """A job's start and the planning of a save on rank 0 of a fake process group, by number of ranks.

    Seconds are CPU seconds. The plans of the other ranks are made up beforehand, and do not count.

    Args:
        ranks: of each job.
        shards: ranks that share one copy of the parameters, at most; there are replicas of it beyond.
        cp: context-parallel ranks.
        model: a Llama of 70 B parameters, or a tiny one.
    """
    if world.size > 1:
        raise UserError("bench scale", f"started on {world.size} ranks", "start it without torchrun")
    distributed.stop()
    rows = []
    for size in ranks:
        if size % min(shards, size) or min(shards, size) % cp:
            raise UserError("--shards", f"{shards} does not fit {size} ranks with cp {cp}", "give a divisor of both")
        start_fake_group(size)
        try:
            rows.append(_measured(_config(size, min(shards, size), cp, LLAMA_70B if model == "70b" else TINY), size))
        finally:
            distributed.stop()
        notes = ["CPU seconds and memory of rank 0; items: parts of tensors in a save; metadata: that file's size"]
        yield {"rows": list(rows), "notes": notes}


def _config(size: int, shards: int, cp: int, shape: dict[str, Any]) -> TrainingConfig:
    strategy = "full_shard" if shards == size else "hybrid_shard"
    return bench_config(
        {
            "model": {"weights": "random", "config": shape},
            "mesh": {"dp_replicate": size // shards, "cp": cp},
            "fsdp": {"strategy": strategy},
            "data": {"seq_len": 8192},
            "train": {"global_batch_size": size, "steps": 1},
        }
    )


def _measured(config: TrainingConfig, size: int) -> dict[str, Any]:
    row: dict[str, Any] = {"ranks": size}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = work()
        row[f"{name}_seconds"] = time.process_time() - began
        return result

    hosts = node_names(size, NODE)
    world = World(0, size, 0, min(NODE, size), torch.device("cpu"), hosts)
    built = build_model(config.model, lora=config.lora)
    with PeakMemory(world.device) as memory, _counts() as counts:
        mesh = timed("mesh", lambda: build_mesh(config.mesh, config.fsdp, world=world))
        timed("drawing", Layout(mesh.sizes, config.fsdp, hosts).draw)
        plan = timed("plan", lambda: plan_parallel(built, config, mesh.sizes, "cpu"))
        timed("memory_plan", lambda: plan_memory(config, built, plan, world=world))
        on_meta = dataclasses.replace(mesh, device=torch.device("meta"))
        timed("parallelize", lambda: parallelize_model(built, plan, mesh=on_meta))
        tensors = _state(built)
        planner = SharedSavePlanner(rank=0, world_size=size)
        planner.set_up_planner(tensors, is_coordinator=True)
        own = timed("own_save_plan", planner.create_local_plan)
    start = memory.peak
    shards = mesh.shard.size(mesh.shard.ndim - 1)
    pickles = [pickle.dumps(one) for one in plans_of_all(planner.state_dict, own, size=size, shards=shards)]
    with PeakMemory(world.device) as memory:
        plans, metadata = timed("save_plan", functools.partial(_plan_save, planner, pickles))
        planner.finish_plan(own)
        results, items = [_results(plan.items) for plan in plans], sum(len(plan.items) for plan in plans)
        del plans, pickles
        written = timed("save_end", functools.partial(_end_save, metadata, results))
    total = sum(value for key, value in row.items() if key.endswith("_seconds"))
    return {
        **row,
        "in_all_seconds": total,
        "peak_bytes": max(start or 0, memory.peak or 0),
        **counts,
        "items": items,
        "metadata_bytes": written,
    }


_counting: list[dict[str, int]] = []


@functools.cache
def _hear_of_files() -> None:
    """From now on count the files that this process opens, but for code; an audit hook cannot be taken back."""

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if _counting and event == "open" and not str(arguments[0]).endswith((".py", ".pyc", ".so", "/status")):
            _counting[-1]["files_opened"] += 1

    sys.addaudithook(see)


@contextmanager
def _counts() -> Iterator[dict[str, int]]:
    """Counts what happens in the block: groups that are made by all and with this rank, object collectives, files."""
    found = {"groups_made": 0, "own_groups": 0, "object_collectives": 0, "reductions": 0, "files_opened": 0}
    make, gather, reduce = dist.distributed_c10d.new_group, dist.all_gather_object, dist.all_reduce

    def new_group(*args: Any, **named: Any) -> Any:
        group = make(*args, **named)
        found["groups_made"] += 1
        found["own_groups"] += group != dist.GroupMember.NON_GROUP_MEMBER
        return group

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **named: Any) -> Any:
            found[name] += 1
            return call(*args, **named)

        return counting

    _hear_of_files()
    _counting.append(found)
    with (
        patch.object(dist.distributed_c10d, "new_group", new_group),
        patch.object(dist, "all_gather_object", counted("object_collectives", gather)),
        patch.object(dist, "all_reduce", counted("reductions", reduce)),
    ):
        try:
            yield found
        finally:
            _counting.pop()


def _state(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a save with AdamW."""
    tensors = model_tensors(model)
    state = {f"state.{name}.{field}": one for name, one in tensors.items() for field in ("exp_avg", "exp_avg_sq")}
    return {"model": tensors, "optimizer": state | {f"state.{name}.step": torch.zeros(()) for name in tensors}}


def plans_of_all(tensors: dict[str, Any], own: SavePlan, *, size: int, shards: int) -> Iterator[SavePlan]:
    """Each rank's plan of a save, by arithmetic: rows are shared out over shards, tensors over replicas.

    Args:
        tensors: by name; DTensors sharded by rows, and numbers.
        own: of rank 0, which has an item for each kind of property.
    """
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=True)
    whole = {item.index.fqn: item for item in planner.create_local_plan().items}
    replicas = size // shards
    writers: dict[str, int] = {}
    for sharded, holders in ((True, replicas), (False, size)):
        names = [name for name in whole if (tensors[name].ndim > 0) is sharded]
        writers |= share_out(((tensors[name].numel() * tensors[name].itemsize, name) for name in names), holders)
    for rank in range(size):
        replica, shard = divmod(rank, shards)
        mine = [name for name in whole if writers[name] == (replica if tensors[name].ndim else rank)]
        items = [_part(whole[name], shard, shards) for name in mine]
        yield dataclasses.replace(own, items=items, planner_data=own.planner_data if rank == 0 else {})


def _part(item: WriteItem, shard: int, shards: int) -> WriteItem:
    """A shard's part of a tensor; it may have no rows."""
    data = item.tensor_data
    assert data is not None, "tensors only"
    if not data.size:
        return item
    each = -(-data.size[0] // shards)
    first, end = (min(data.size[0], each * number) for number in (shard, shard + 1))
    offset, sizes = torch.Size([first, *[0] * (len(data.size) - 1)]), torch.Size([end - first, *data.size[1:]])
    chunk = ChunkStorageMetadata(offsets=offset, sizes=sizes)
    index = MetadataIndex(item.index.fqn, offset, item.index.index)
    return dataclasses.replace(item, index=index, tensor_data=dataclasses.replace(data, chunk=chunk))


def _plan_save(planner: dcp.DefaultSavePlanner, pickles: list[bytes]) -> tuple[list[SavePlan], Metadata]:
    """What rank 0 does before a save: it is sent all plans, and sends the final ones."""
    plans, metadata = planner.create_global_plan([pickle.loads(one) for one in pickles])
    for plan in plans:
        pickle.dumps(plan)
    return plans, metadata


def _end_save(metadata: Metadata, results: list[bytes]) -> int:
    """What rank 0 does after a save: it is told where all parts are, and writes that down. The size of that file."""
    metadata.storage_data = {one.index: one.storage_data for part in results for one in pickle.loads(part)}
    return len(pickle.dumps(metadata))


def _results(items: Sequence[WriteItem]) -> bytes:
    """What a rank sends when it has written these."""
    place = _any_place()
    return pickle.dumps([WriteResult(item.index, 0, dataclasses.replace(place)) for item in items])


@functools.cache
def _any_place() -> Any:
    """Where DCP says that a tensor is, as an object of its own kind."""
    with tempfile.TemporaryDirectory() as folder:
        save_tensors({"model": {"one": torch.zeros(1)}}, Path(folder), alone=True)
        (place,) = FileSystemReader(folder).read_metadata().storage_data.values()
    return place
