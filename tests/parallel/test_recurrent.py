"""Layers that carry a state along the sequence: documents stay apart, and heads are shared out.

The reference runs each document alone in plain transformers.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fsdp2kit.config.schema import FSDPConfig, MeshConfig
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.parallel.context_parallel.attention import apply_attention
from fsdp2kit.parallel.context_parallel.batch import slice_batch
from fsdp2kit.parallel.context_parallel.borders import Borders
from fsdp2kit.parallel.context_parallel.layout import VARLEN, AttentionPath, Method, chunks_of
from fsdp2kit.parallel.context_parallel.recurrent import SCANS, Exchange, apply_recurrent, find_recurrent
from fsdp2kit.parallel.context_parallel.recurrent_checks import measure
from fsdp2kit.parity.reference import Rows, errors
from tests.parallel.helpers.alone import Reference, documents_alone
from tests.parallel.helpers.covering import Row, Table
from tests.parallel.helpers.isolation import leaks
from tests.parallel.helpers.steps import one_step
from tests.planner.helpers.models import planned
from tests.support.cases import Case, run_cases
from tests.support.models import (
    PACKED_RECURRENT,
    RECURRENT,
    beyond,
    full,
    slow,
    tiny_config,
    tiny_model,
    tiny_model_dir,
)
from tests.support.traffic import Traffic, count_traffic
from tests.support.workers import WorkerPool

METHODS: tuple[Method, ...] = ("ulysses", "ring", "allgather")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "kind": PACKED_RECURRENT,
    "mesh": ((1, 1), (1, 2), (2, 2), (1, 4)),  # dp, cp
    "method": ("auto", *METHODS),
    "checkpointing": (False, "full", "selective"),
    "micro": (1, 2),
    "pack": (True, False),
}


def _fits(row: Row) -> bool:
    return not ({"mesh", "method"} <= row.keys() and (row["mesh"][1] == 1) != (row["method"] == "auto"))


def _case(row: Row) -> Case:
    dp, cp = row["mesh"]
    # At a larger rate, experts of these tiny models amplify rounding beyond the gate's control.
    return Case(
        dp=dp, cp=cp, lr=3e-4, **{key: row[key] for key in ("kind", "method", "checkpointing", "micro", "pack")}
    )


COVERING = [_case(row) for row in Table(OPTIONS, _fits).covering()]
FIRST = {kind: next(case for case in COVERING[at:] if case.kind == kind) for at, kind in enumerate(PACKED_RECURRENT)}
FULL = [
    Case("nemotron_h", 1, 2, 1, method="ring", checkpointing="selective", lr=3e-4),
    *(case for kind, case in FIRST.items() if kind != "nemotron_h"),
]
SLOW = [case for case in COVERING if case not in FULL]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny models of `RECURRENT`."""
    folder = tmp_path_factory.mktemp("recurrent")
    for kind in RECURRENT:
        tiny_model_dir(kind, folder)
    return folder


@pytest.fixture(scope="module")
def reference(models: Path) -> Reference:
    return documents_alone(models)


@pytest.mark.parametrize(
    "case", [*map(full, FULL), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_training_equals_each_document_alone(case: Case, pool: WorkerPool, models: Path, reference: Reference) -> None:
    exact, control = reference(case)
    found = pool.run(case.world, run_cases, models, [case])[0][0]
    differences = errors(found, exact)
    print(case, differences, "control", control)
    assert found.gradients.keys() == exact.gradients.keys()
    assert min(exact.grad_norm) > 0.5, "clipping must take part"
    assert max(control.values()) < 4e-5, "the reference itself must be sharp"
    assert not beyond(differences, control)


# Experts add up tokens of all documents in one product, whose rounding then depends on who else is there.
DENSE = ("qwen3_5", "olmo_hybrid", "falcon_h1", "bamba", "lfm2")


@pytest.mark.parametrize(
    ("kind", "method", "cp"),
    [
        (slow if kind in ("olmo_hybrid", "bamba") else full)(kind, METHODS[at % 3], (2, 4, 1)[at % 3])
        for at, kind in enumerate(DENSE)
        if kind in PACKED_RECURRENT
    ],
)
def test_no_document_sees_another(kind: str, method: Any, cp: int, pool: WorkerPool, models: Path) -> None:
    """Random packings, bit for bit: 200 in all."""
    seeds = list(range(7000, 7040))
    case = Case(kind, 1, cp, method=method if cp > 1 else "auto")
    assert pool.run(cp, leaks, models, case, seeds) == [[]] * cp


@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize("history", [1, 2, 3])
def test_the_layout_of_a_convolution_is_each_documents_alone(method: Method | None, history: int) -> None:
    """By its definition: the sum over the tokens before, of the same document."""
    cp, starts = 1 if method is None else 3, [[0, 1, 3, 10, 24], [0, 17, 24]]
    tokens = torch.arange(1.0, 49.0).view(2, 24)
    tails = [
        tokens[:, chunk.stop - history : chunk.stop]
        for rank in range(cp)
        for chunk in chunks_of(rank, cp=cp, length=24, method=method)
    ]
    for rank in range(cp):
        chunks = chunks_of(rank, cp=cp, length=24, method=method)
        mine = torch.cat([tokens[:, chunk.start : chunk.stop] for chunk in chunks], dim=1)
        borders = Borders(starts=starts, device=torch.device("cpu"), method=method, rank=rank, cp=cp)
        read, written = borders.convolution(history)
        before = torch.cat(tails, dim=1) if cp > 1 else tokens[:, :0]
        laid_out = torch.cat([torch.zeros(1), before.flatten(), mine.flatten()])[read]
        found = laid_out.unfold(0, history + 1, 1).sum(1)[written - history].view(2, -1)
        indices = [index for chunk in chunks for index in chunk]
        for row, at in ((row, at) for row in range(2) for at in range(len(indices))):
            first = max(start for start in starts[row][:-1] if start <= indices[at])
            alone = tokens[row, max(first, indices[at] - history) : indices[at] + 1]
            assert found[row, at] == alone.sum()


@pytest.mark.parametrize("kind", ["qwen3_5", "bamba"])
def test_cuda_kernels_are_told_of_borders(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins that have the kernels' arguments, and run each document that these name by transformers' code."""
    model = tiny_model(kind)
    (layer,) = find_recurrent(model).values()
    name = next(name for name in SCANS if hasattr(inspect.getmodule(type(layer)), name))
    scan, plain = replace(SCANS[name]), getattr(inspect.getmodule(type(layer)), name)
    monkeypatch.setitem(SCANS, name, scan)

    hidden = torch.randn(2, 24, 72)
    borders = Borders(starts=[[0, 1, 3, 10, 24], [0, 17, 24]], device=torch.device("cpu"))
    alone = [
        torch.cat([layer(part) for part in row.split(torch.tensor(starts).diff().tolist(), dim=1)], dim=1)
        for row, starts in zip(hidden.split(1), borders.starts, strict=True)
    ]

    def kernel(*args: Any, cu_seqlens: Any = None, seq_idx: Any = None, **kwargs: Any) -> Any:
        given = {**dict(zip(inspect.signature(plain).parameters, args, strict=False)), **kwargs}
        along = [key for key in scan.heads + scan.groups if given.get(key) is not None]
        rows = []
        for row in range(given[along[0]].shape[0]):
            cuts = seq_idx[row].unique_consecutive(return_counts=True)[1] if cu_seqlens is None else cu_seqlens.diff()
            parts = [given[key][row : row + 1].split(cuts.tolist(), dim=1) for key in along]
            found = [plain(**{**given, **dict(zip(along, each, strict=True))}) for each in zip(*parts, strict=True)]
            rows.append(torch.cat([one[0] if isinstance(one, tuple) else one for one in found], dim=1))
        return (torch.cat(rows), None) if isinstance(found[0], tuple) else torch.cat(rows)

    kernel.__signature__ = inspect.signature(
        plain
    ).replace(  # type: ignore[attr-defined]
        parameters=[*inspect.signature(plain).parameters.values()][:-1]
    )
    monkeypatch.setitem(sys.modules, scan.package, SimpleNamespace(**{scan.kernel: lambda cu_seqlens, seq_idx: None}))
    assert scan.kernel_takes_borders
    monkeypatch.setattr(inspect.getmodule(type(layer)), name, kernel)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    apply_recurrent(model, Exchange())
    torch.testing.assert_close(layer(hidden, borders=borders), torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_the_planner_sends_what_a_step_does(pool: WorkerPool, models: Path) -> None:
    case = Case("qwen3_5", 1, 2, 1, method="ulysses")
    traffic = pool.run(2, one_step, models, case)[0]
    found = Traffic()
    for one in planned(case.config(models, steps=2, rows=8), ranks=2, device_type="cpu").collectives:
        for _ in range(one.calls):
            found.add(one.kind, one.sent // one.calls)
    assert found.calls == traffic.calls
    assert found.total == traffic.total


LENGTH, LAYERS = 768, 2
PURE: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 18, "mamba_n_groups": 4, "attn_layer_indices": []},
    "lfm2": {},
}


def measure_costs(kind: str, method: Method | None, cp: int, starts: list[int]) -> tuple[int, int, int, tuple]:
    """What recurrent layers alone keep and send for one row, in float32. Collective.

    Returns:
        Memory that autograd keeps, parameters aside, bytes that this rank sends in forward and in backward for a
        layer, and these by the formula.
    """
    mesh = build_mesh(MeshConfig(cp=cp), FSDPConfig(), world=distributed.start())
    config = tiny_config(kind, **PURE[kind])
    if kind != "bamba":
        config.layer_types = [config.layer_types[0]] * LAYERS
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    attach_loss(model, own_head=False)
    path = AttentionPath(method, VARLEN if method in ("ring", "allgather") else "sdpa", recurrent_layers=LAYERS)
    shape = measure(next(iter(find_recurrent(model).values())), model)
    apply_attention(model, path, group=mesh.cp_group)
    positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(starts)])[None]
    ids = positions % 128
    batch = Rows(ids, ids, positions).as_batch()
    cpu = torch.device("cpu")
    inputs = slice_batch(batch, config=model.config, path=path, cp_rank=mesh.cp_rank, cp=cp, device=cpu)
    kept: dict[int, int] = {}
    aside = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in aside:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), count_traffic() as forward:
        loss = model.loss_sum(**inputs)
    with count_traffic() as backward:
        loss.backward()
    chunks = 1 if method == "ulysses" else 2
    formula = shape.bytes_sent(rows=1, tokens=LENGTH // cp, chunks=chunks, cp=cp, rank=mesh.cp_rank)
    return sum(kept.values()), forward.total // LAYERS, backward.total // LAYERS, formula


@pytest.mark.parametrize(
    ("kind", "method", "cp"),
    [
        ("qwen3_5", "ulysses", 2),
        full("bamba", "ring", 4),
        *(full(kind, "allgather", 2) for kind in PACKED_RECURRENT if kind == "lfm2"),
    ],
)
def test_memory_is_shared_out_and_traffic_is_as_planned(kind: str, method: Method, cp: int, pool: WorkerPool) -> None:
    for starts in ([0, LENGTH], [0, 100, 500, LENGTH]):
        ((whole, *_),) = pool.run(1, measure_costs, kind, None, 1, starts)
        for activations, there, back, formula in pool.run(cp, measure_costs, kind, method, cp, starts):
            assert (there, back) == formula
            assert activations * cp == pytest.approx(whole, rel=0.15)
