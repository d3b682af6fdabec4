"""What the workers run: a sharded model, and engines that keep what they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp2kit.config.sections.optimizer import OptimizerConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.job.distributed import local_part
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.parity.engine import RankBatches, Sharded
from fsdp2kit.rl.engines.engine import Bucket, Entry, SharedMemorySender, VersionedWeights
from fsdp2kit.rl.sleep import Tag, sleep, wake_up
from fsdp2kit.rl.weight_sync import sync_weights
from fsdp2kit.torch_compat import inner_tensors, parameter_groups
from fsdp2kit.train.step import accumulate_gradients, cross_entropy, next_batch
from tests.planner.helpers.trace import StepAllocations
from tests.support.cases import Case, build
from tests.support.models import make_batches
from tests.support.traffic import count_traffic


class Engine(VersionedWeights):
    """Keeps copies of the tensors, and the sizes of the buckets they came in.

    Args:
        on_bucket: called with the number of each bucket, before it is kept.
    """

    def __init__(self, on_bucket: Callable[[int], object] = lambda number: None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.buckets: list[int] = []
        self.on_bucket = on_bucket

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        self.tensors, self.buckets = {}, []

    def load_weights(self, bucket: Bucket) -> None:
        self.on_bucket(len(self.buckets))
        self.buckets.append(bucket.data.numel())
        for name, tensor in bucket.tensors():
            assert name not in self.tensors, f"{name} was sent twice"
            self.tensors[name] = tensor.clone()
        bucket.data.fill_(255)  # as when its memory is used again

    def arrays(self) -> dict[str, np.ndarray]:
        """Their bits, which every rank must have alike."""
        return {name: bits(tensor) for name, tensor in self.tensors.items()}


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def sharded_model(folder: Path, case: Case) -> Sharded:
    return build(case.config(folder, steps=1, rows=case.dp))


def change(model: nn.Module) -> None:
    """As a step of training does, to what is trained, in a way that any rank and any process can do to its part."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                local_part(parameter).mul_(1.5)


def synced(folder: Path, case: Case, dtype: torch.dtype, buckets: Sequence[float]) -> list[Any]:
    """What an engine has after a sync with each size of buckets, and after one more, when the trained part changed."""
    model = sharded_model(folder, case).model
    found = []
    for mib in buckets:
        engine = Engine()
        sent = sync_weights(model, engine, version=7, dtype=dtype, bucket_mib=mib)
        assert sent == sum(tensor.nbytes for tensor in engine.tensors.values())
        assert engine.version == 7
        found.append((engine.arrays(), engine.buckets))
    change(model)
    sync_weights(model, engine, version=8, dtype=dtype, bucket_mib=buckets[0])
    assert engine.version == 8
    return [*found, (engine.arrays(), engine.buckets)]


class Reader(VersionedWeights):
    """Keeps nothing."""

    def load_weights(self, bucket: Bucket) -> None:
        assert all(tensor.is_contiguous() for _, tensor in bucket.tensors())


class Held(StepAllocations):
    """Follows what has memory: tensors on meta have a size and none of it."""

    def _see(self, tensor: Tensor) -> Any:
        return super()._see(torch.empty(0) if tensor.is_meta else tensor)


def cost(folder: Path, case: Case, dtypes: Sequence[torch.dtype], mib: float) -> list[tuple[int, int, int]]:
    """Of a sync in each dtype: the most bytes that it held beside the model, bytes sent, and collectives."""
    model = sharded_model(folder, case).model
    found = []
    for dtype in dtypes:
        peaks = []
        for _ in range(5):  # gloo's own thread lets go of a tensor a moment after its work was waited for
            with Held() as memory, count_traffic() as traffic:
                memory.mark([*model.parameters(), *model.buffers()], "model")
                memory.start()
                sync_weights(model, Reader(), version=1, dtype=dtype, bucket_mib=mib)
                peaks.append(sum(size for allocation, size in memory.peak() if allocation.category != "model"))
        found.append((min(peaks), traffic.total, sum(traffic.calls.values())))
    return found


def broken(folder: Path, case: Case) -> tuple[str, int | None, str, str, dict[str, np.ndarray]]:
    """A sync, one that breaks off on rank 1, and one more: what each left behind."""
    model = sharded_model(folder, case).model
    options: Any = {"dtype": torch.bfloat16, "bucket_mib": 0.01}
    engine = Engine()
    sync_weights(model, engine, version=1, **options)

    def fail(number: int) -> None:
        if number == 1 and dist.get_rank() == 1:
            raise OSError("the server is gone")

    engine.on_bucket = fail
    change(model)
    raised = _error(lambda: sync_weights(model, engine, version=2, **options))
    version, refusal = engine.version, _error(lambda: engine.require(2))
    engine.on_bucket = lambda number: None
    sync_weights(model, engine, version=3, **options)
    engine.require(3)
    return (
        raised,
        version,
        refusal.removeprefix("RunFailure: "),
        _error(lambda: engine.require(4))[12:],
        engine.arrays(),
    )


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except (OSError, RunFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def send_and_wait(connection: Any) -> None:
    """Send two buckets through shared memory; after each wait for an answer."""
    paths: list[str] = []

    def deliver(path: str) -> None:
        paths.append(path)
        connection.send(path)
        connection.recv()

    sender = SharedMemorySender(deliver)
    entries = (
        Entry("count", (), torch.int64, 0),
        Entry("matrix", (2, 3), torch.bfloat16, 8),
        Entry("scale", (1,), torch.float32, 20),
    )
    bucket = Bucket(entries, torch.empty(24, dtype=torch.uint8))
    values = {"count": torch.tensor(7), "matrix": torch.arange(6).view(2, 3).bfloat16(), "scale": torch.tensor([0.5])}
    for version in (1, 2):
        sender.begin_update(version)
        for name, tensor in bucket.tensors():
            tensor.copy_(values[name] * version)
        sender.load_weights(bucket)
        sender.finish_update(version)
        connection.send((sender.version, Path(paths[-1]).exists()))


def naps(
    folder: Path, case: Case, section: OptimizerConfig, sleeps: bool
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of four steps, and this rank's bits after them; ``sleeps``: with naps in between."""
    config = case.config(folder, steps=4, rows=6 if case.dp == 3 else 4)
    sharded = build(config)
    model = sharded.model
    optimizer = build_optimizer(section, model, state_on_host=config.fsdp.offload == "optimizer")
    loader = RankBatches(
        make_batches(4, rows=config.train.global_batch_size), 1, sharded.mesh.dp_rank, sharded.mesh.sizes.dp
    )
    losses = []
    for number in range(4):
        batch = next_batch(loader, number, mesh=sharded.mesh)
        loss = accumulate_gradients(model, batch, objective=cross_entropy, shard=sharded.inputs, fsdp=config.fsdp)
        losses.append(loss.item())
        if sleeps and number == 1:
            _nap(model, optimizer, ["weights"])  # gradients and all
        optimizer.step()
        optimizer.zero_grad()
        if sleeps:
            _nap(model, optimizer, ["weights", "optimizer"] if number else ["optimizer"])
    with torch.no_grad():
        state = {name: bits(local_part(parameter)) for name, parameter in model.named_parameters()}
    for number, tensor in enumerate(_moments(optimizer)):
        state[f"moment {number}"] = bits(tensor)
    return losses, state


def _moments(optimizer: Any) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [part for value in values if value.ndim for part in inner_tensors(value)]


def _nap(model: nn.Module, optimizer: Any, what: list[Tag]) -> None:
    """Sleep and wake up; nothing may be left, and everything be the object that it was."""

    def storages() -> dict[int, int]:
        with torch.no_grad():
            tensors = [local_part(p) for p in model.parameters()] if "weights" in what else []
            tensors += [local_part(p.grad) for p in model.parameters() if p.grad is not None] if tensors else []
            tensors += _moments(optimizer) if "optimizer" in what else []
            found = [tensor.untyped_storage() for tensor in tensors]
            if "weights" in what:  # what FSDP itself holds of them
                units = [module for module in model.modules() if isinstance(module, FSDPModule)]
                groups = [group for unit in units for group in parameter_groups(unit)]
                for parameter in (parameter for group in groups for parameter in group.fsdp_params):
                    inner = [parameter._sharded_param_data, *parameter.all_gather_outputs]
                    found += [tensor.untyped_storage() for tensor in inner]
        return {storage._cdata: storage.nbytes() for storage in found}

    def objects() -> list[int]:
        found = [*model.parameters(), *(p.grad for p in model.parameters())]
        return [id(one) for one in [*found, *(v for state in optimizer.state.values() for v in state.values())]]

    reshard_all(model)
    before, same = storages(), objects()
    moved = sleep(model, optimizer, what)
    assert moved.nbytes == sum(before.values()) > 0
    assert not any(storages().values())
    assert sleep(model, optimizer, what).nbytes == 0
    awake = [wake_up(model, [tag]).nbytes for tag in [*what, *what]]
    assert all(awake[: len(what)])
    assert sum(awake) == moved.nbytes
    assert (storages(), objects()) == (before, same)


def asleep(folder: Path, case: Case) -> dict[str, str]:
    """What is said when something is used that is asleep."""
    config = case.config(folder, steps=1, rows=4)
    sharded = build(config)
    model = sharded.model
    optimizer = build_optimizer(config.optimizer, model)
    inputs = sharded.inputs(make_batches(1, rows=1)[0].as_batch())
    model.loss_sum(**inputs).backward()
    optimizer.step()
    found = {}

    def used(name: str, work: Callable[[], object]) -> None:
        found[name] = _error(work).removeprefix("RunFailure: ")

    sleep(model, optimizer)
    used("forward", lambda: model(input_ids=inputs["input_ids"]))
    used("loss_sum", lambda: model.loss_sum(**inputs))
    used("a layer", lambda: sharded.layers[next(iter(sharded.layers))](torch.zeros(1, 4, 72)))
    used("sync", lambda: sync_weights(model, Reader(), version=1, dtype=torch.bfloat16))
    used("step", optimizer.step)
    wake_up(model, ["weights"])
    model.loss_sum(**inputs).backward()
    used("step with weights", optimizer.step)
    wake_up(model)
    optimizer.step()
    return found
