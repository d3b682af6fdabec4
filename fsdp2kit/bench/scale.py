"""What grows with the number of ranks: a job's start, a save and a resume, on rank 0 of a fake process group."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from fsdp2kit.bench.harness import PeakMemory
from fsdp2kit.bench.sides import bench_config
from fsdp2kit.checkpoint.reader import SafeReader
from fsdp2kit.checkpoint.save_plan import BriefWriter, Kind, SharedSavePlanner, Written, kinds_of
from fsdp2kit.checkpoint.state import model_tensors
from fsdp2kit.config import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World
from fsdp2kit.job.layout import Layout, node_names
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.planner.estimate import plan_memory
from fsdp2kit.torch_compat import start_fake_group

NODE = 8
"""Ranks of a node."""
ARCHIVE = 1200
"""Bytes of a stored part beside its values, about."""
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
    """A job's start, and what a save and a resume take but for the values, on rank 0, by number of ranks.

    Seconds are CPU seconds. What the other ranks send is made up beforehand, and does not count.

    Args:
        ranks: of each job.
        shards: ranks that share one copy of the parameters, at most; there are replicas of it beyond.
        cp: context-parallel ranks.
        model: a Llama of 70 B parameters, or a tiny one.
    """
    if world.size > 1:
        raise UserError("bench scale", f"started on {world.size} ranks", "start it without torchrun")
    ranks.stop()
    rows = []
    for size in ranks:
        if size % min(shards, size) or min(shards, size) % cp:
            raise UserError("--shards", f"{shards} does not fit {size} ranks with cp {cp}", "give a divisor of both")
        start_fake_group(size)
        try:
            rows.append(_measured(_config(size, min(shards, size), cp, LLAMA_70B if model == "70b" else TINY), size))
        finally:
            ranks.stop()
        notes = ["CPU seconds and memory of rank 0; parts: of tensors in a save; metadata: that file's size"]
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
    with PeakMemory(world.device) as at_start, _counts() as counts:
        mesh = timed("mesh", lambda: build_mesh(config.mesh, config.fsdp, world=world))
        timed("drawing", Layout(mesh.sizes, config.fsdp, hosts).draw)
        plan = timed("plan", lambda: plan_parallel(built, config, mesh.sizes, "cpu"))
        timed("memory_plan", lambda: plan_memory(config, built, plan, world=world))
        on_meta = dataclasses.replace(mesh, device=torch.device("meta"))
        timed("parallelize", lambda: parallelize_model(built, plan, mesh=on_meta))
        planner = SharedSavePlanner(rank=0, world_size=size)
        planner.set_up_planner(_state(built), is_coordinator=True)
        own = timed("own_save_plan", planner.create_local_plan)
    ranks = list(sent_by_all(planner.state_dict, own, size=size, shards=mesh.shard.size(mesh.shard.ndim - 1)))
    pickles = [[pickle.dumps(part) for part in parts] for parts in zip(*ranks, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        with PeakMemory(world.device) as at_save:
            metadata = timed("save_plan", lambda: _plan_save(planner, pickles[0]))
            timed("save_end", lambda: _end_save(Path(folder), metadata, pickles[1]))
        for _, (written, *_) in ranks:
            Path(folder, written.file).touch()
        with PeakMemory(world.device) as at_resume:
            timed("resume", lambda: _plan_load(Path(folder), planner.state_dict))
        written_bytes = Path(folder, ".metadata").stat().st_size
    total = sum(value for key, value in row.items() if key.endswith("_seconds"))
    return {
        **row,
        "in_all_seconds": total,
        "peak_bytes": max(at_start.peak or 0, at_save.peak or 0),
        "resume_peak_bytes": at_resume.peak or 0,
        **counts,
        "items_sent": sum(len(plan.items) for plan, _ in ranks),
        "parts": sum(len(one.tensors) for _, written in ranks for one in written),
        "metadata_bytes": written_bytes,
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


def sent_by_all(
    tensors: dict[str, Any], own: SavePlan, *, size: int, shards: int
) -> Iterator[tuple[SavePlan, list[Written]]]:
    """What each rank sends in a save, by arithmetic: rows are shared out over shards, tensors over replicas.

    Args:
        tensors: by name; DTensors sharded by rows, and numbers.
        own: rank 0's plan, whose digest all ranks send.
    """
    items = {item.index.fqn: item for item in create_default_local_save_plan(tensors, True).items}
    of_kind: dict[Kind, list[int]] = {}
    for number, kind in enumerate(kinds_of(tensors, world_size=size).values()):
        of_kind.setdefault(kind, []).append(number)
    names = sorted(tensors)
    for rank in range(size):
        replica, shard = divmod(rank, shards)
        plan, written, end = [], {}, 0
        for kind, numbers in of_kind.items():
            if kind.writer == (replica if kind.placements else rank):
                plan.append(_part(items[names[numbers[0]]], shard, shards))
                start = plan[-1].index.offset
                length = plan[-1].tensor_data.chunk.sizes.numel() * kind.dtype.itemsize + ARCHIVE
                found = written.setdefault(start, Written(f"__{rank}_0.distcp", start))
                found.tensors.extend(numbers)
                found.lengths.extend([length] * len(numbers))
                found.offsets.extend(range(end, end + length * len(numbers), length))
                end = found.offsets[-1] + length
        yield dataclasses.replace(own, items=plan), list(written.values())


def _part(item: Any, shard: int, shards: int) -> Any:
    """A shard's part of a tensor; it may have no rows."""
    data = item.tensor_data
    if not data.size:
        return item
    each = -(-data.size[0] // shards)
    first, end = (min(data.size[0], each * number) for number in (shard, shard + 1))
    offset, sizes = torch.Size([first, *[0] * (len(data.size) - 1)]), torch.Size([end - first, *data.size[1:]])
    chunk = ChunkStorageMetadata(offsets=offset, sizes=sizes)
    index = MetadataIndex(item.index.fqn, offset)
    return dataclasses.replace(item, index=index, tensor_data=dataclasses.replace(data, chunk=chunk))


def _plan_save(planner: SharedSavePlanner, pickles: list[bytes]) -> Metadata:
    """What rank 0 does before a save: it is sent all plans, and sends the final ones."""
    plans, metadata = planner.create_global_plan([pickle.loads(one) for one in pickles])
    for plan in plans:
        pickle.dumps(plan)
    return metadata


def _end_save(folder: Path, metadata: Metadata, pickles: list[bytes]) -> None:
    """What rank 0 does after a save: it is told where all parts are, writes that down, and sends the rest to all."""
    BriefWriter(folder).finish(metadata, [pickle.loads(one) for one in pickles])
    pickle.dumps(metadata)


def _plan_load(folder: Path, tensors: dict[str, Any]) -> None:
    """What every rank does before it reads its shards."""
    create_default_local_load_plan(tensors, SafeReader(folder).read_metadata())
