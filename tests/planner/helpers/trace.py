"""The independent witness of the planner's formulae: run the real modules on tensors without memory, and add up.

`trace_step` builds the model as a run does, shards it over a fake process group, and runs a step in `FakeTensorMode`:
every operator allocates, nothing computes. It does not see memory inside operators (attention's kernels, exchanges).
torch's `FSDPMemTracker` does the same, but does not know methods registered beside ``forward``, as our loss is.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from fsdp2kit.config.checks import MeshSizes, resolve_accumulation
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.data.loader import Batch
from fsdp2kit.job.distributed import World
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.build import build_model, materialize
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parallel.context_parallel.batch import build_slice_batch
from fsdp2kit.parallel.context_parallel.layout import VARLEN
from fsdp2kit.parallel.expert_parallel.experts import routed_experts, routed_experts_backward
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import ParallelPlan, plan_parallel
from fsdp2kit.planner.allocations import Allocations, by_category
from fsdp2kit.planner.dispatch import even_rows
from fsdp2kit.torch_compat import (
    FakeTensorMode,
    accumulated_gradients,
    accumulated_partial_sums,
    accumulated_shards,
)

RANGES = {
    "FSDP::all_gather": "all-gather buffers",
    "FSDP::all_gather_copy_out": "unsharded parameters",
    "FSDP::pre_forward": "unsharded parameters",
    "FSDP::pre_backward": "unsharded parameters",
    "FSDP::post_backward_reduce": "reduction buffers",
    "FSDP::post_backward_accumulate": "unsharded gradients",
    "FSDP::post_backward_reshard": "unsharded gradients",
}
"""Ranges that FSDP2 opens while it allocates, and the category of each. In nested ranges the innermost counts."""


class StepAllocations(Allocations):
    """Also tells what FSDP2 allocates by the ranges it opens, and follows the storages that it resizes.

    Args:
        vocabulary: tensors of forward with a dimension of this size count for the loss.
    """

    def __init__(self, fake: FakeTensorMode | None = None, *, vocabulary: int = 0) -> None:
        super().__init__(fake)
        self._vocabulary = vocabulary
        self._ranges: list[str] = []
        self._resize = torch.UntypedStorage.resize_
        self.default = "activations"
        """The category of what is allocated outside of FSDP2."""
        self.on_range: Callable[[str], None] = lambda name: None
        """Called when a range of FSDP2 begins."""

    def __enter__(self) -> StepAllocations:
        tracker, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in tracker._alive:
                tracker._resize_to(tracker._alive[storage._cdata][1], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # FSDP2 frees and allocates gathered parameters so
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("profiler._record_function_enter"):
            self._ranges.append(args[0])
            self.on_range(args[0])
        elif name.startswith("profiler._record_function_exit"):
            self._ranges.pop()
        adds = name == "aten.add.Tensor" and self._fake is not None and not torch.is_grad_enabled()
        if adds and all(
            isinstance(arg, Tensor) and arg.ndim == 2 and len(arg) == self._vocabulary for arg in args[:2]
        ):
            # The parts of a tied table's gradient: autograd adds to the first in place, but not to a fake tensor.
            self._resize_to(self._see(args[0]), 0)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def category_of(self, tensor: Tensor) -> str:
        for name in reversed(self._ranges):
            if category := RANGES.get(name.partition(" (")[0]):
                return category
        return "loss" if self._vocabulary and self._vocabulary in tensor.shape else self.default


def synthetic_batch(rows: int, length: int) -> Batch:
    """Rows of one document each, every token a target."""
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    positions = torch.arange(length).repeat(rows, 1)
    return Batch(
        input_ids=tokens,
        labels=tokens,
        position_ids=positions,
        supervised_tokens=rows * length,
        input_tokens=rows * length,
        attention_pairs=rows * length**2,
    )


def log_likelihood(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, None]:
    """An objective made of tokens' log-probabilities, as preferences and rewards are."""
    return -model.token_log_probs(**inputs)[0].sum(), None


def trace_step(
    config: TrainingConfig, sizes: MeshSizes, *, accumulate: Callable[..., Any]
) -> dict[str, dict[str, int]]:
    """Run one step of rank 0 on fake tensors. No process group may be up.

    Args:
        sizes: of the mesh.
        accumulate: `fsdp2kit.train.step.accumulate_gradients` with an objective: the loop's own.

    Returns:
        Bytes by category at the peak of "forward", "backward" and "optimizer", as in `memory.CATEGORIES`.
    """
    assert config.optimizer.name not in ("adamw_bf16", "adamw_8bit"), "they read values that a trace does not have"
    with _fake_group(sizes.world_size) as world:
        # The fake group does not know the ranks of a node, by which "auto" sizes were decided.
        mesh = build_mesh(config.mesh.model_copy(update=asdict(sizes)), config.fsdp, world=world)
        model: Any = build_model(config.model, lora=config.lora)
        plan = plan_parallel(model, config, sizes, "cpu")
        inputs = _inputs(config, model, plan, mesh)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        # On meta until the mode is open, in which ranks cannot talk to each other.
        parallelize_model(model, plan, mesh=replace(mesh, device=torch.device("meta")))
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
            StepAllocations(fake, vocabulary=vocabulary) as allocations,
            _even_routing(),
        ):
            materialize(model, device=torch.device("cpu"))
            optimizer = build_optimizer(config.optimizer, model)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # makes its state
            optimizer.zero_grad()
            _mark_lasting(allocations, model, optimizer)
            fakes = {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
            allocations.mark(fakes.values(), "inputs")
            train = config.train
            count = resolve_accumulation(train.global_batch_size, train.micro_batch_size, dp=sizes.dp)
            # The part of a global batch that `accumulate` reads; a third micro-batch takes as much as any after it.
            batch = SimpleNamespace(
                micro_batches=[None] * min(count, 3),
                num_items=train.micro_batch_size * config.data.seq_len,
                losses=[],
            )
            peaks: dict[str, dict[str, int]] = {}

            def end(name: str) -> None:
                _mark_lasting(allocations, model, optimizer)
                peaks[name] = by_category(allocations.peak())
                allocations.start()

            allocations.on_range = partial(_mark_gradients, allocations, model)
            allocations.start()
            accumulate(model, batch, shard=lambda _: dict(fakes), fsdp=config.fsdp, end_phase=end)
            allocations.default = "optimizer"
            allocations.start()
            optimizer.step()
            end("optimizer")
    return peaks


def _mark_gradients(allocations: StepAllocations, model: Any, name: str) -> None:
    """File a unit's gradients when their reduction begins: ``FSDP::post_backward_accumulate (model.layers.3)``."""
    if name.startswith("FSDP::post_backward_accumulate"):
        module = name.partition("(")[2].rstrip(")")
        unit = model if module in ("", "root") else model.get_submodule(module)  # nothing, in some versions
        gradients = [p.grad for p in unit.parameters()], accumulated_gradients(unit)
        allocations.mark(itertools.chain(*gradients), "unsharded gradients")


def _mark_lasting(allocations: Allocations, model: nn.Module, optimizer: Any) -> None:
    # Gathered, partitioned experts still are DTensors, over the ranks that they are partitioned over.
    meshes = ((p, p.device_mesh.mesh_dim_names) for p in model.parameters() if hasattr(p, "device_mesh"))
    allocations.mark((p for p, dims in meshes if "shard" in dims), "parameters")
    allocations.mark(model.buffers(), "buffers")
    allocations.mark((p.grad for p in model.parameters() if hasattr(p.grad, "device_mesh")), "gradients")
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        allocations.mark((gradient for _, gradient in accumulated_shards(unit)), "gradients")
        allocations.mark(accumulated_partial_sums(unit), "gradients")
    allocations.mark((value for state in optimizer.state.values() for value in state.values()), "optimizer")


def _inputs(config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan, mesh: Any) -> dict[str, Any]:
    batch = synthetic_batch(config.train.micro_batch_size, config.data.seq_len)
    inputs = build_slice_batch(model.config, path=plan.attention, mesh=mesh)(batch)
    if plan.attention.kernel != VARLEN:
        del inputs["position_ids"]  # transformers would look into them for the borders of documents
    return inputs


@contextlib.contextmanager
def _even_routing() -> Iterator[None]:
    """On fake tensors, partitioned experts get as many tokens as in an even routing."""

    def forward(hidden: Tensor, index: Tensor, _weights: Any, parameters: list[Tensor], number: int, *_: Any) -> Any:
        rows, width = even_rows(index, len(parameters[0]), number), parameters[0].shape[1]
        received, projected = (hidden.new_empty(rows, size) for size in (hidden.shape[1], width))
        return torch.empty_like(hidden), received, projected, index.new_empty(1)

    def backward(grad: Tensor, _index: Any, weights: Tensor, _saved: Any, parameters: list[Tensor], *_: Any) -> Any:
        return [torch.empty_like(one) for one in (grad, weights, *parameters)]

    operators: Any = {routed_experts: forward, routed_experts_backward: backward}
    before = {operator: operator._abstract_fn for operator in operators}
    for operator, function in operators.items():
        operator._abstract_fn = function
    try:
        yield
    finally:
        for operator, function in before.items():
            operator._abstract_fn = function


@contextlib.contextmanager
def _fake_group(world_size: int) -> Iterator[World]:
    assert not dist.is_initialized(), "a trace starts a process group of its own"
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield World(0, world_size, 0, world_size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
