"""From sharded parameters to an engine's weights, a bucket at a time.

Shards of a bucket's tensors are cast, gathered by one collective as bytes, rank by rank, and put in order; the next
bucket is gathered meanwhile. Besides the model, memory holds at most two buckets and the largest tensor. Names and
pieces are those of an export (`fsdp2kit.checkpoint.hf`): adapters are merged, a tied tensor is sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2kit.errors import UserError
from fsdp2kit.job import stop
from fsdp2kit.job.distributed import agree, agreement, gather_objects, local_part
from fsdp2kit.job.stop import Stopped
from fsdp2kit.optim.host_state import in_batches, largest_shard
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.rl.engines.engine import Bucket, Entry, VersionedWeights
from fsdp2kit.rl.sleep import check_awake
from fsdp2kit.torch_compat import all_gather_single, local_slices
from fsdp2kit.weights.adapters import ADAPTER, Adapter, base_name, merged_weight
from fsdp2kit.weights.entries import WeightEntry, entries
from fsdp2kit.weights.modules import build_skeleton
from fsdp2kit.weights.record import find_ties, weights_of


def sync_weights(
    model: Any, engine: VersionedWeights, *, version: int, dtype: torch.dtype, bucket_mib: float = 256
) -> int:
    """Send a model's weights to an engine, as its export would have them. Collective: every rank has an engine.

    It sends parameters and persistent buffers, a tied one once, with adapters merged. Frozen ones go only to an engine
    without a version (at the first sync, and after one that failed). If this rank's engine raises, so does this, after
    all ranks have finished; the other ranks raise a `RunFailure`. If any rank is asked to stop, all raise `Stopped`.

    Args:
        model: as `parallelize_model` made it; units that a forward left gathered are freed.
        engine: this rank's. It has ``version`` when all ranks' engines have it, and none if any of them raised.
        dtype: floating-point tensors are cast to it before they travel, except for those that transformers keeps in
            float32 (`Weights.dtypes`).
        bucket_mib: MiB of a bucket. A larger tensor (or several that transformers converts together) has its own.

    Returns:
        Bytes that the engine received.
    """
    check_awake(model)
    reshard_all(model)
    everything = not engine.takes_parts or None in gather_objects(engine.version)
    with agreement():
        plan = _plan(model, dtype)
        if not everything:
            plan = {entry: weights for entry, weights in plan.items() if any(one.changes for one in weights)}
        weights = [weight for weights in plan.values() for weight in weights]
        shards = _Shards.of([tensor for one in weights for tensor in (one.tensor, *one.adapter)])
        engine.begin_update(version)
    problem: BaseException | None = None
    loaded = 0

    def load(bucket: Bucket) -> None:
        nonlocal problem, loaded
        loaded += sum(entry.nbytes for entry in bucket.entries)
        if problem is None:  # after an error the others still need this rank's shards
            try:
                stop.check()
                engine.load_weights(bucket)
            except (Exception, Stopped) as error:
                problem = error

    with torch.no_grad():
        _send(plan, shards, round(bucket_mib * 2**20), load)
    agree(problem)
    with agreement():
        engine.finish_update(version)
    return loaded


@dataclass(frozen=True, eq=False)
class _Weight:
    """A tensor of the model's, and how it is sent."""

    tensor: Tensor
    form: Tensor
    """A meta tensor like the whole one, in the dtype in which it is sent."""
    layer: Any = None
    """peft's layer, if an adapter is merged into the tensor."""
    adapter: tuple[Tensor, ...] = ()
    """Its parameters, as `merged_weight` takes them."""

    @property
    def changes(self) -> bool:
        """Whether training changes it; a buffer may change."""
        return bool(self.adapter) or self.tensor.requires_grad or not isinstance(self.tensor, nn.Parameter)

    def within(self, data: Tensor, offset: int) -> Tensor:
        """The whole tensor that begins at byte ``offset`` of ``data``."""
        return data[offset : offset + self.form.nbytes].view(self.form.dtype).view(self.form.shape)

    def shard_bytes(self, ranks: int) -> int:
        """Bytes of the largest shard; a tensor that is not sharded has none."""
        is_gathered = ranks == 1 or isinstance(self.tensor, DTensor)
        return largest_shard(self.tensor) * self.form.itemsize if is_gathered else 0


def _plan(model: Any, dtype: torch.dtype) -> dict[WeightEntry, list[_Weight]]:
    """The entries of a model, each with its sources in memory; the same on every rank."""
    skeleton = build_skeleton(model)
    adapter = weights_of(model).adapter
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        inner = base_name(name)
        # A module that an adapter trains whole is there twice: the trained copy counts.
        if inner is not None and (inner not in found or tensor.requires_grad):
            found[inner] = tensor
    ties = find_ties(model)
    tensors = {name: found[name] for name in skeleton.state_dict() if name not in ties}
    plan: dict[WeightEntry, list[_Weight]] = {}
    for entry in entries(skeleton, tensors, dtype):
        plan[entry] = []
        for name, form in entry.sources.items():
            parts = _adapter_parts(name, adapter, parameters)
            layer = model.get_submodule(name.rpartition(".")[0]) if parts else None
            plan[entry].append(_Weight(tensors[name], form, layer, parts))
    return plan


def _adapter_parts(name: str, adapter: Adapter | None, parameters: Mapping[str, nn.Parameter]) -> tuple[Tensor, ...]:
    """The parameters of the adapter that is merged into a tensor, as `merged_weight` takes them."""
    layer, _, leaf = name.rpartition(".")
    if adapter is None or layer not in adapter.layers or leaf != "weight":
        return ()
    keys = [f"{layer}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B", "lora_magnitude_vector")]
    return tuple(parameters[key] for key in keys if key in parameters)


def _send(
    plan: Mapping[WeightEntry, Sequence[_Weight]], shards: _Shards, bucket_bytes: int, load: Callable[[Bucket], object]
) -> None:
    """Gather the entries bucket by bucket, and give each to ``load`` while the next is gathered."""

    def size(entry: WeightEntry) -> int:  # bytes while it is gathered
        return sum(max(one.form.nbytes, shards.ranks * one.shard_bytes(shards.ranks)) for one in plan[entry])

    batches = list(in_batches([*plan], size, largest=bucket_bytes))
    weights = [[weight for entry in batch for weight in plan[entry]] for batch in batches]
    sizes = [sum(map(size, batch)) for batch in batches]
    # A bucket that is gathered in order, or is too large, has its own memory, one at a time. The others share memory:
    # on a CPU, allocating it costs more than writing to it.
    alone = [
        shards.ranks == 1 or len(within) == 1 or each > bucket_bytes
        for within, each in zip(weights, sizes, strict=True)
    ]
    largest = max((each for each, by_itself in zip(sizes, alone, strict=True) if not by_itself), default=0)
    memory = [torch.empty(largest, dtype=torch.uint8, device=shards.device) for _ in range(2)]

    def begin(number: int) -> _BucketGather:
        return _BucketGather(weights[number], shards, None if alone[number] else memory)

    ahead: _BucketGather | None = None
    for number, batch in enumerate(batches):
        bucket = _to_bucket(batch, weights[number], ahead or begin(number))
        ahead = begin(number + 1) if number + 1 < len(batches) and not all(alone[number : number + 2]) else None
        load(bucket)
        del bucket  # before the next one is put in order


def _to_bucket(batch: Sequence[WeightEntry], weights: Sequence[_Weight], gather: _BucketGather) -> Bucket:
    data, offsets = gather.finish()
    found = []
    place = iter(zip(weights, offsets, strict=True))
    for entry in batch:
        found += _in_bucket(entry, [next(place) for _ in entry.sources], data)
    return Bucket(tuple(found), data)


def _in_bucket(entry: WeightEntry, places: Sequence[tuple[_Weight, int]], data: Tensor) -> list[Entry]:
    """Convert the tensors within ``data``, where they begin at these offsets."""
    if entry.convert is None:
        ((name, form),) = entry.forms.items()
        return [Entry(name, tuple(form.shape), form.dtype, places[0][1])]
    sources = zip(entry.sources, places, strict=True)
    converted = entry.convert({name: weight.within(data, offset) for name, (weight, offset) in sources})
    names, tensors = zip(*converted.items(), strict=True)
    views = [tensor.untyped_storage().data_ptr() == data.untyped_storage().data_ptr() for tensor in tensors]
    if all(views) and all(tensor.is_contiguous() for tensor in tensors):
        offsets = [tensor.data_ptr() - data.data_ptr() for tensor in tensors]
    else:  # conversion copied pieces: put them back into the bucket
        tensors = [tensor.clone() if view else tensor for tensor, view in zip(tensors, views, strict=True)]
        offsets, _ = _layout(((tensor.nbytes, tensor.itemsize) for tensor in tensors), places[0][1])
        for offset, tensor in zip(offsets, tensors, strict=True):
            data[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    forms = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return [Entry(name, *form, offset) for name, form, offset in zip(names, forms, offsets, strict=True)]


@dataclass(frozen=True)
class _Shards:
    """How parameters are sharded."""

    ranks: int
    rank: int
    group: dist.ProcessGroup | None
    device: torch.device
    """Where they are gathered."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Shards:
        """How all these tensors are sharded; those that are whole on every rank do not matter.

        They are sharded over dim 0 and one dim of one mesh, or as `parts` takes them over the same ranks. Others are
        refused.
        """
        sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if not sharded:
            return cls(1, 0, None, tensors[0].device if tensors else torch.device("cpu"))
        first = next((tensor for tensor in sharded if _is_by_rows(tensor)), sharded[0])
        dims = [dim for dim, placement in enumerate(first.placements) if not isinstance(placement, Replicate)]
        mesh = first.device_mesh
        group = first.device_mesh.get_group(dims[0]) if dims else None
        for tensor in sharded:
            is_same = (tensor.device_mesh, tensor.placements) == (mesh, first.placements)
            if group is None or not _is_by_rows(first) or not (is_same or _is_dealt_out(tensor, group)):
                what = f"a parameter is sharded as {tensor.placements} over {tensor.device_mesh}"
                raise UserError("weight sync", what, "shard parameters alike, or over other dims of the same ranks")
        assert group is not None
        return cls(group.size(), group.rank(), group, torch.device(mesh.device_type))

    def parts(self, tensor: Tensor) -> list[tuple[slice, ...]] | None:
        """The part of a tensor that each rank of the group holds; None: rank by rank, neighbouring rows."""
        if not isinstance(tensor, DTensor) or self.group is None or _is_by_rows(tensor):
            return None
        found = []
        for rank in dist.get_process_group_ranks(self.group):
            part = [slice(0, size) for size in tensor.shape]
            coordinate = (tensor.device_mesh.mesh == rank).nonzero()[0].tolist()
            for placement, at, ranks in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
                if isinstance(placement, Shard):
                    size = tensor.shape[placement.dim]
                    most = -(-size // ranks)
                    part[placement.dim] = slice(min(size, at * most), min(size, (at + 1) * most))
            found.append(tuple(part))
        return found


def _is_by_rows(tensor: DTensor) -> bool:
    """Whether it is sharded over dim 0 and one dim of its mesh."""
    return [placement for placement in tensor.placements if not isinstance(placement, Replicate)] == [Shard(0)]


def _is_dealt_out(tensor: DTensor, group: dist.ProcessGroup) -> bool:
    """Whether the group's ranks hold a tensor's parts, cut along each of its dims once at most."""
    dims = [placement.dim for placement in tensor.placements if isinstance(placement, Shard)]
    is_known = all(isinstance(placement, (Shard, Replicate)) for placement in tensor.placements)
    ranks = set(dist.get_process_group_ranks(group))
    is_known = is_known and not _is_by_rows(tensor)  # these would be taken in the group's order
    return is_known and len(set(dims)) == len(dims) and ranks <= set(tensor.device_mesh.mesh.flatten().tolist())


class _BucketGather:
    """Gathers whole tensors: the constructor begins, `finish` waits.

    Args:
        memory: one tensor to gather into, and one to put them in order in; None: it allocates both.
    """

    def __init__(self, weights: Sequence[_Weight], shards: _Shards, memory: Sequence[Tensor] | None = None) -> None:
        self._weights = weights
        self._ranks = shards.ranks
        self._memory = memory
        self._device = shards.device
        self._parts = [shards.parts(weight.tensor) for weight in weights]
        self._sizes = [weight.shard_bytes(shards.ranks) for weight in weights]
        self._places, size = _layout(zip(self._sizes, (weight.form.dtype.itemsize for weight in weights), strict=True))
        adapters = iter(self._adapters(shards))
        self._gathered = self._take(0, shards.ranks * size).view(shards.ranks, size)
        mine = self._gathered[shards.rank]
        # Adapters of tensors that are whole on every rank (`fsdp.ignored_modules`): `finish` merges them.
        self._to_merge: dict[_Weight, list[Tensor]] = {}
        for weight, place, most in zip(weights, self._places, self._sizes, strict=True):
            parts = [next(adapters) for _ in weight.adapter]
            if parts and not most:
                self._to_merge[weight] = parts
            if most:
                local = _merged_shard(weight, parts) if parts else local_part(weight.tensor)
                end = place + local.numel() * weight.form.dtype.itemsize
                mine[place:end].view(weight.form.dtype).copy_(local.reshape(-1))
        self._work = _begin_gather(self._gathered, shards) if shards.ranks > 1 and size else []

    def _take(self, which: int, size: int) -> Tensor:
        if self._memory is None or size > len(self._memory[which]):  # gaps between dtypes may not fit
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[which][:size]

    def _adapters(self, shards: _Shards) -> list[Tensor]:
        """The adapters' whole parameters: each rank needs all of a factor to merge its part."""
        parts = [
            _Weight(part, torch.empty(part.shape, dtype=part.dtype, device="meta"))
            for weight in self._weights
            for part in weight.adapter
        ]
        if not parts:
            return []
        data, offsets = _BucketGather(parts, shards).finish()
        return [part.within(data, offset) for part, offset in zip(parts, offsets, strict=True)]

    def finish(self) -> tuple[Tensor, Sequence[int]]:
        """The tensors one after the other, ``[bytes]`` uint8, and where each begins; called once."""
        for work in self._work:
            work.wait()
        gathered = self._gathered
        del self._gathered, self._work  # the work holds the tensor, too
        is_alone = len(self._weights) == 1 and isinstance(self._weights[0].tensor, DTensor)
        if self._ranks == 1 or (is_alone and self._parts[0] is None):
            # The shards are in order, and padding comes after them.
            return gathered.view(-1), self._places
        offsets, size = _layout((weight.form.nbytes, weight.form.dtype.itemsize) for weight in self._weights)
        data = self._take(1, size)
        pieces = zip(self._weights, self._parts, self._places, self._sizes, offsets, strict=True)
        for weight, parts_of_ranks, place, shard, offset in pieces:
            whole = weight.within(data, offset).view(-1)
            if parts_of_ranks is not None:
                by_rank = gathered[:, place : place + shard].view(weight.form.dtype)
                for part, sent in zip(parts_of_ranks, by_rank, strict=True):
                    target = whole.view(weight.tensor.shape)[part]
                    target.copy_(sent[: target.numel()].view(target.shape))
                continue
            if not shard:
                parts = self._to_merge.pop(weight, None)
                local = _merged_shard(weight, parts) if parts else weight.tensor
                whole.copy_(local.reshape(-1))
                continue
            shards = gathered[:, place : place + shard].view(weight.form.dtype)
            full, rest = divmod(len(whole), shards.shape[1])
            whole[: len(whole) - rest].view(full, -1).copy_(shards[:full])
            if rest:
                whole[-rest:].copy_(shards[full, :rest])
        return data, offsets


def _begin_gather(gathered: Tensor, shards: _Shards) -> list[Any]:
    """Fill the other ranks' rows of ``gathered``, ``[ranks, bytes]`` uint8; returns what to wait for."""
    if gathered.device.type == "cpu":  # gloo's all-gather would need memory for all of it once more
        rows = enumerate(gathered)
        return [dist.broadcast(row, group=shards.group, group_src=rank, async_op=True) for rank, row in rows]
    mine = gathered[shards.rank]
    return [all_gather_single(gathered.view(-1), mine, group=shards.group, async_op=True)]


def _merged_shard(weight: _Weight, adapter: Sequence[Tensor]) -> Tensor:
    """This rank's rows of a layer's weight with its adapter merged into them, in float32."""
    a, b, *magnitude = adapter
    rows = local_slices(weight.tensor)[0]
    if weight.layer.fan_in_fan_out:
        a = a[:, rows]
    else:
        b = b[rows]
        magnitude = [lengths[rows] for lengths in magnitude]
    return merged_weight(local_part(weight.tensor), weight.layer, a, b, *magnitude)


def _layout(sizes: Iterable[tuple[int, int]], begin: int = 0) -> tuple[list[int], int]:
    """Where things of so many bytes begin that follow one another, each at a multiple of its items' size; and the end.

    The end is a multiple of every item's size.
    """
    offsets = []
    end = begin
    widest = 1
    for size, itemsize in sizes:
        offsets.append(-(-end // itemsize) * itemsize)
        end = offsets[-1] + size
        widest = max(widest, itemsize)
    return offsets, -(-end // widest) * widest
