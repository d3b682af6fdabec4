"""In one step the host waits for the device once, to read loss and gradient norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.data.loader import Batch
from fsdp2kit.job import distributed
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parallel.context_parallel.batch import slice_batch
from fsdp2kit.parallel.context_parallel.layout import AttentionPath
from fsdp2kit.parity.engine import RankBatches, Sharded
from fsdp2kit.parity.reference import make_batches
from fsdp2kit.train import step as training_step
from fsdp2kit.train.step import next_batch
from tests.support.cases import Case, step
from tests.support.host_syncs import HostSyncs, count_host_syncs, host_tensors
from tests.support.models import LENGTH, VOCABULARY, needs_torchao, tiny_model, tiny_model_dir
from tests.support.workers import WorkerPool
from tests.train.helpers import mixed_loader

CPU = torch.device("cpu")
STEPS = 2


def count_step(folder: Path, case: Case, *, rows: int = 4, mix: bool = False, optimizer: str = "adamw") -> HostSyncs:
    """The waits of two steps, with clipping; what the first one leaves on the host is known in the second."""
    torch.manual_seed(0)
    config = case.config(folder, steps=2, rows=rows)
    values = config.model_dump()
    config = TrainingConfig.model_validate(values | {"optimizer": values["optimizer"] | {"name": optimizer}})
    sharded = Sharded(config, world=distributed.start())
    mesh = sharded.mesh
    batches: Any = RankBatches(
        make_batches(2, rows=rows, length=LENGTH, vocabulary=VOCABULARY), case.micro, mesh.dp_rank, mesh.sizes.dp
    )
    if mix:
        batches = mixed_loader(micro=case.micro, dp_rank=mesh.dp_rank, dp_size=mesh.sizes.dp)
    chosen = build_optimizer(config.optimizer, sharded.model)
    schedule = build_lr_schedule(config.lr_schedule, chosen, total_steps=2)
    read = [next_batch(batches, index, mesh=mesh) for index in range(STEPS)]
    host = host_tensors((micro for batch in read for micro in batch.micro_batches), chosen)
    with count_host_syncs(CPU, host=host) as syncs:
        for index, batch in enumerate(read):
            step(sharded, chosen, schedule, batch, number=index + 1)
    return syncs


def count_steps(folder: Path, cases: list[dict[str, Any]]) -> list[HostSyncs]:
    return [count_step(folder, **case) for case in cases]


# As packed rows run on CUDA: attention over documents, without transformers' masks.
ONE = Case("llama3", attention="varlen")
ONE_RANK: list[dict[str, Any]] = [
    {"case": Case("llama3", micro=4, attention="varlen")},
    {"case": ONE, "rows": 3},
    {"case": Case("smollm2", attention="varlen", checkpointing="full")},
    {"case": Case("gemma3", attention="varlen", checkpointing="selective")},
    {"case": Case("granite", attention="varlen")},
    {"case": Case("qwen3_moe", attention="varlen")},
    {"case": Case("llama3", attention="varlen", fsdp=(("reduce_every_micro_batch", True),))},
    {"case": ONE, "mix": True},
    *({"case": ONE, "optimizer": name} for name in ("adamw_bf16", "muon")),
]
EIGHT_BITS: list[dict[str, Any]] = [{"case": ONE, "optimizer": "adamw_8bit"}]
TWO_RANKS: list[dict[str, Any]] = [
    {"case": Case("llama3", dp=2, attention="varlen")},
    {"case": Case("smollm2", dp=2, attention="varlen"), "optimizer": "muon"},
    {"case": Case("smollm2", cp=2, micro=2, method="ulysses", attention="varlen"), "mix": True},
    {"case": Case("smollm2", cp=2, micro=2, method="ulysses", attention="sdpa")},
    {"case": Case("mistral", cp=2, micro=2, method="ulysses", attention="sdpa")},
    {"case": Case("smollm2", cp=2, micro=2, method="ring")},
    {"case": Case("llama3", cp=2, micro=2, method="allgather", checkpointing="full")},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for kind in ("llama3", "smollm2", "gemma3", "granite", "qwen3_moe", "mistral"):
        tiny_model_dir(kind, path)
    return path


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(1, ONE_RANK, id="one rank"),
        pytest.param(2, TWO_RANKS, id="two ranks"),
        pytest.param(1, EIGHT_BITS, id="8-bit moments", marks=needs_torchao),
    ],
)
def test_a_step_waits_once(ranks: int, cases: list[dict[str, Any]], folder: Path, pool: WorkerPool) -> None:
    for found in pool.run(ranks, count_steps, folder, cases):
        for case, syncs in zip(cases, found, strict=True):
            assert syncs.calls == {"tolist": STEPS}, (case, syncs.places)
            assert all("step.py" in place for place in syncs.places)


def test_transformers_masks_wait_in_every_micro_batch(folder: Path, pool: WorkerPool) -> None:
    """They look at the positions, whether a row holds several documents; "varlen" has none of them."""
    (found,) = pool.run(1, count_step, folder, Case("llama3", micro=2))
    assert found.calls == {"_local_scalar_dense": 2 * STEPS, "tolist": STEPS}
    assert sum("find_packed_sequence_indices" in place for place in found.places) == 2 * STEPS


def with_item_slipped_in(folder: Path) -> HostSyncs:
    """A step whose gradient norm is looked at."""
    original = training_step._norm

    def looked_at(gradient: Tensor) -> Tensor:
        norm = original(gradient)
        assert norm.item() >= 0
        return norm

    training_step._norm = looked_at
    try:
        return count_step(folder, ONE)
    finally:
        training_step._norm = original


def test_an_item_that_slips_in_is_counted(folder: Path, pool: WorkerPool) -> None:
    (found,) = pool.run(1, with_item_slipped_in, folder)
    parameters = len(list(tiny_model("llama3").parameters()))
    assert found.calls == {"_local_scalar_dense": parameters * STEPS, "tolist": STEPS}
    assert sum("looked_at" in place for place in found.places) == parameters * STEPS


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "if": lambda x: bool(x[0] > 0),
    "float": lambda x: float(x.sum()),
    "mask": lambda x: x[x > 0],
    "assign by a mask": lambda x: x.__setitem__(x > 0, x[:2].clone()),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "copy to the host": lambda x: torch.zeros(3).copy_(x),
    "copy from the host": lambda x: x.copy_(torch.zeros(3)),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "range": lambda x: range(x.long()[0]),
}
NOT_WAITING: dict[str, Callable[[Tensor], object]] = {
    "product": lambda x: x @ x,
    "index": lambda x: x[torch.zeros(2, dtype=torch.long, device=x.device)],
    "where of three": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long(), output_size=4),
    "another dtype": lambda x: x.to(torch.float64),
    "a copy on the device": lambda x: torch.empty(3, device=x.device).copy_(x),
    "not blocking": lambda x: x.copy_(torch.zeros(3), non_blocking=True),
    "the host's own": lambda x: (torch.ones(3).nonzero().tolist(), torch.tensor([1, 2]).max().item()),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_counted(name: str) -> None:
    x = torch.tensor([1.0, 0.0, 3.0])
    with count_host_syncs(CPU) as syncs:
        WAITING[name](x)
    assert syncs.count == 1, syncs.places
    assert __file__ in syncs.places[0]


@pytest.mark.parametrize("name", NOT_WAITING)
def test_what_does_not_wait_is_not_counted(name: str) -> None:
    x = torch.tensor([1.0, 0.0, 3.0])
    with count_host_syncs(CPU) as syncs:
        NOT_WAITING[name](x)
    assert syncs.count == 0, syncs.places


def test_a_batch_is_the_hosts_until_it_is_moved() -> None:
    host = torch.tensor([1.0, 0.0])
    with count_host_syncs(CPU, host=[host]) as syncs:
        assert (host[1:] > 0).nonzero().tolist() == []
        moved = host.to(torch.device("cpu"))
        assert syncs.count == 0
        moved.nonzero()
        (host.sum() + moved).tolist()
    assert syncs.calls == {"nonzero": 1, "tolist": 1}


@pytest.mark.parametrize(
    "path",
    [
        AttentionPath(None, "varlen"),
        AttentionPath(None, "flash_attention_2"),
        AttentionPath("ring", "varlen"),
        AttentionPath("allgather", "varlen"),
        AttentionPath("ulysses", "varlen"),
    ],
    ids=str,
)
def test_batches_go_to_cuda_from_pinned_memory_without_waiting(
    path: AttentionPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every copy that a micro-batch asks for, on a machine without a device."""
    copies: list[bool] = []
    pinned: set[int] = set()

    def pin(tensor: Tensor) -> Tensor:
        pinned.add(tensor.data_ptr())
        return tensor

    def to(tensor: Tensor, *target: Any, non_blocking: bool = False, **others: Any) -> Tensor:
        if target and isinstance(target[0], torch.device) and target[0].type == "cuda":
            copies.append(non_blocking and tensor.data_ptr() in pinned and tensor.is_contiguous())
            return tensor.clone()
        return original(tensor, *target, **others)

    original = Tensor.to
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    config = tiny_model("llama3").config
    (rows,) = make_batches(1, rows=4, length=LENGTH, vocabulary=VOCABULARY)
    batch: Batch = replace(rows.as_batch(), sources=torch.arange(4), tokens_by_source=(1, 1, 1, 1))
    slice_batch(
        batch,
        config=config,
        path=path,
        cp_rank=1 if path.method else 0,
        cp=2 if path.method else 1,
        device=torch.device("cuda"),
    )
    assert len(copies) >= 5, "ids, labels, positions, index, groups"
    assert all(copies)
