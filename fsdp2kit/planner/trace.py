"""The other way to the same figures: run the real modules on tensors without memory, and add up what they allocate.

`trace_step` builds the model as a run does, shards it over a fake process group, and runs a step in `FakeTensorMode`:
every operator allocates, nothing computes. `Allocations` follows each storage from its allocation to its end. torch's
`FSDPMemTracker` does the same, but does not know methods that are registered beside ``forward``, as our loss is.

What it cannot see: memory that operators use inside themselves (attention's kernels and exchanges).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp2kit.config.checks import MeshSizes, resolve_accumulation
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.data.loader import Batch
from fsdp2kit.distributed import World, local_part
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, decoder_layers, materialize
from fsdp2kit.model.inspect import backbone_name
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.attention import use_attention, varlen_attention
from fsdp2kit.parallel.context_parallel.batch import attention_inputs, build_shard_batch
from fsdp2kit.parallel.context_parallel.layout import VARLEN
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.parallel.nf4 import apply_nf4
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import ParallelPlan, plan_parallel
from fsdp2kit.planner.activations import LayerMemory
from fsdp2kit.torch_compat import (
    FakeTensorMode,
    TorchDispatchMode,
    accumulated_gradients,
    fake_store,
    tree_leaves,
)

Peaks = dict[str, dict[str, int]]
"""Bytes by category at the peak of each phase."""

# What FSDP2 says of itself while it allocates, and the category of it. Of nested ranges the innermost that is named.
_RANGES = {
    "FSDP::all_gather": "all-gather buffers",
    "FSDP::all_gather_copy_out": "unsharded parameters",
    "FSDP::pre_forward": "unsharded parameters",
    "FSDP::pre_backward": "unsharded parameters",
    "FSDP::post_backward_reduce": "reduction buffers",
    "FSDP::post_backward_accumulate": "unsharded gradients",
    "FSDP::post_backward_reshard": "unsharded gradients",
}


@dataclass(eq=False)
class _Allocation:
    bytes: int
    category: str
    before: list[tuple[int, int]] = field(default_factory=list)
    """The sizes that it had, each with the number of the event that ended it; none before it was allocated."""

    def at(self, event: int) -> int:
        """Its bytes after that event."""
        return next((size for end, size in self.before if event < end), self.bytes)

    def resize(self, size: int, event: int) -> None:
        self.before.append((event, self.bytes))
        self.bytes = size


_Snapshot = list[tuple[_Allocation, int]]
"""What was allocated at one moment, with its bytes then."""


class Allocations(TorchDispatchMode):
    """Follows the storages that operators allocate while it is open.

    Args:
        fake: the mode whose tensors are followed; DTensor tries operators out in others. None: real tensors.
        vocabulary: tensors of forward with a dimension of this size count for the loss.
    """

    def __init__(self, fake: FakeTensorMode | None = None, *, vocabulary: int = 0) -> None:
        super().__init__()
        self._fake, self._vocabulary = fake, vocabulary
        self._alive: dict[int, tuple[Any, _Allocation]] = {}
        self._ranges: list[str] = []
        self._total = self._highest = 0
        self._seen: list[_Allocation] = []
        """All that was allocated at any time since `start`."""
        self._event = self._peak = 0
        """Allocations, resizes and frees so far; how many there were when most was allocated."""
        self._default = "activations"
        self._resize = torch.UntypedStorage.resize_
        self.on_range: Callable[[str], None] = lambda name: None
        """Called when a range of FSDP2 begins."""

    def __enter__(self) -> Allocations:
        tracker, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            tracker._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # FSDP2 frees and allocates gathered parameters so
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("profiler._record_function_enter"):
            self._ranges.append(args[0])
            self.on_range(args[0])
        elif name.startswith("profiler._record_function_exit"):
            self._ranges.pop()
        if name == "aten.add.Tensor" and self._adds_gradients(args):
            # Autograd adds to the first in place, but not if it is a fake tensor.
            self._resize_to(self._see(args[0]), 0)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and getattr(leaf, "fake_mode", None) is self._fake:
                self._see(leaf)
        return result

    def mark(self, tensors: Iterator[Any] | list[Any], category: str) -> None:
        """Put tensors, known or new, into a category."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._see(local_part(tensor)).category = category

    def start(self, category: str = "activations") -> None:
        """Forget the peak; what is allocated from now on, outside of FSDP2, is of this category."""
        self._default, self._highest, self._peak = category, self._total, self._event
        self._seen = [allocation for _, allocation in self._alive.values()]
        for allocation in self._seen:
            allocation.before.clear()

    def peak(self) -> _Snapshot:
        """What was allocated when that was most, since `start`; a later `mark` still changes its categories."""
        return [(allocation, allocation.at(self._peak)) for allocation in self._seen]

    def alive(self) -> dict[str, int]:
        """Bytes that are allocated, by category."""
        return _by_category(self.snapshot())

    def snapshot(self) -> _Snapshot:
        """What is allocated; as with `peak`, its categories may still change."""
        return [(allocation, allocation.bytes) for _, allocation in self._alive.values()]

    def _adds_gradients(self, args: Any) -> bool:
        """Whether both parts of a tied table's gradient are added up."""
        tables = all(isinstance(arg, Tensor) and arg.ndim == 2 and len(arg) == self._vocabulary for arg in args[:2])
        return tables and self._fake is not None and not torch.is_grad_enabled()

    def _see(self, tensor: Tensor) -> _Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive and self._alive[key][0]() is not None:
            return self._alive[key][1]
        allocation = _Allocation(0, self._category(tensor))
        reference = weakref.ref(storage, lambda _, key=key: self._resize_to(self._alive.pop(key)[1], 0))
        self._alive[key] = (reference, allocation)
        self._seen.append(allocation)
        self._resize_to(allocation, storage.nbytes())
        return allocation

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            self._resize_to(self._alive[storage._cdata][1], storage.nbytes())

    def _resize_to(self, allocation: _Allocation, size: int) -> None:
        """Allocation and end are changes of size, too; each is one event, and `peak` goes back to the highest."""
        self._event += 1
        self._total += size - allocation.bytes
        allocation.resize(size, self._event)
        if self._total > self._highest:
            self._highest, self._peak = self._total, self._event

    def _category(self, tensor: Tensor) -> str:
        for name in reversed(self._ranges):
            if category := _RANGES.get(name.partition(" (")[0]):
                return category
        return "loss" if self._vocabulary and self._vocabulary in tensor.shape else self._default


def _by_category(peak: _Snapshot) -> dict[str, int]:
    found: dict[str, int] = {}
    for allocation, size in peak:
        found[allocation.category] = found.get(allocation.category, 0) + size
    return found


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


@dataclass(frozen=True)
class _Micro:
    """What `accumulate_gradients` reads of a global batch."""

    micro_batches: list[Any]
    num_items: int


def trace_step(config: TrainingConfig, sizes: MeshSizes, *, accumulate: Callable[..., Any]) -> Peaks:
    """Run one step of rank 0 on fake tensors. No process group may be up.

    Args:
        sizes: of the mesh.
        accumulate: `fsdp2kit.train.step.accumulate_gradients` with an objective: the loop's own.

    Returns:
        Bytes by category at the peak of "forward", "backward" and "optimizer", as in `memory.CATEGORIES`.

    Raises:
        UserError: an optimizer that cannot be traced.
    """
    if config.optimizer.name not in ("adamw", "muon"):
        what = f"optimizer.name = {config.optimizer.name!r}, which looks at values that a trace does not have"
        raise UserError("--trace", what, "add optimizer.name=adamw")
    with _fake_group(sizes.world_size) as world:
        mesh = build_mesh(config.mesh, config.fsdp, world=world)
        model: Any = build_model(config.model, lora=config.lora)
        plan = plan_parallel(model, config, sizes, "cpu")
        inputs = _inputs(config, model, plan, mesh)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        # On meta until the mode is open, in which ranks cannot talk to each other.
        parallelize_model(model, plan, mesh=replace(mesh, device=torch.device("meta")))
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
            Allocations(fake, vocabulary=vocabulary) as allocations,
        ):
            materialize(model, device=torch.device("cpu"))
            optimizer = build_optimizer(config.optimizer, model)
            _make_state(optimizer)
            _mark_lasting(allocations, model, optimizer)
            fakes = {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
            allocations.mark(list(fakes.values()), "inputs")
            count = resolve_accumulation(config.train.global_batch_size, config.train.micro_batch_size, dp=sizes.dp)
            tokens = config.train.micro_batch_size * config.data.seq_len
            micro = _Micro([None] * min(count, 2), tokens)
            peaks: Peaks = {}

            def end(name: str) -> None:
                _mark_lasting(allocations, model, optimizer)
                peaks[name] = _by_category(allocations.peak())
                allocations.start()

            def on_range(name: str) -> None:
                if name.startswith("FSDP::post_backward_accumulate"):
                    unit = model.get_submodule(_module_in(name))
                    allocations.mark([p.grad for p in unit.parameters()], "unsharded gradients")
                    allocations.mark(list(accumulated_gradients(unit)), "unsharded gradients")

            allocations.on_range = on_range
            allocations.start()
            accumulate(model, micro, shard=lambda _: dict(fakes), fsdp=config.fsdp, mesh=mesh, end_phase=end)
            allocations.start("optimizer")
            optimizer.step()
            end("optimizer")
    return peaks


class _Counted(NamedTuple):
    """Bytes of one layer."""

    kept: int
    forward: int
    """More than that at once, in forward."""
    backward: int
    """More than at its beginning at once, in backward."""
    gradients: int
    """Of its weights, at that moment."""


def count_layers(config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan) -> list[LayerMemory]:
    """Every decoder layer's memory, counted on one layer of each kind in a pass over fake tensors.

    The kernel is the plan's; its exchanges are left out, and so is what Ulysses adds to a layer.
    """
    layers = decoder_layers(model)
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    # The first that learns has no gradient to hand on, if what is before it is frozen.
    learns = list(itertools.accumulate([model.get_input_embeddings(), *layers], _or_learns, initial=False))[1:]
    kinds = [
        (type(layer).__name__, kind, str([tuple(p.shape) for p in layer.parameters()]), before)
        for layer, kind, before in zip(layers, types, learns, strict=False)
    ]
    firsts = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    depth = max(firsts.values()) + 1
    modes = {"none": False, plan.activation_checkpointing.mode: True}
    counted = {mode: _count(config, model, plan, depth=depth, checkpointed=on) for mode, on in modes.items()}
    item = getattr(torch, plan.fsdp.param_dtype).itemsize
    tokens = config.train.micro_batch_size * config.data.seq_len // plan.sizes.cp
    hidden = tokens * item * int(model.config.get_text_config().hidden_size)
    found = []
    for number, kind in enumerate(kinds):
        kept, forward, backward, gradients = counted["none"][firsts[kind]]
        recomputed, on_host = 0, 0
        section = plan.activation_checkpointing
        if section.mode != "none" and number % section.every == 0:
            everything = kept + hidden * (2 if section.mode == "selective" else 1)
            kept, forward, *_ = counted[section.mode][firsts[kind]]
            recomputed = max(0, everything - kept)
            if section.offload and plan.device_type != "cpu":
                kept, on_host = kept - hidden, hidden
        found.append(
            LayerMemory(
                kept=kept,
                kept_on_host=on_host,
                recomputed=recomputed,
                forward=forward,
                mlp_backward=backward,
                mlp_gradients=gradients,
                source="counted",
            )
        )
    return found


def _count(
    config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan, *, depth: int, checkpointed: bool
) -> list[_Counted]:
    """Of each of the first ``depth`` layers."""
    small, layers = _first_layers(model, depth + 1)
    small.to(getattr(torch, plan.fsdp.param_dtype))
    if plan.nf4 is not None:
        there = dict(small.named_modules())
        apply_nf4(replace(plan.nf4, names=tuple(name for name in plan.nf4.names if name in there)), small)
    path = replace(plan.attention, method=None)
    if path.kernel == VARLEN:
        use_attention(small, varlen_attention)
    if checkpointed:
        apply_activation_checkpointing(plan.activation_checkpointing, layers, device_type="cpu")
    length = config.data.seq_len // plan.sizes.cp
    batch = synthetic_batch(config.train.micro_batch_size, length)
    cpu = torch.device("cpu")
    inputs = attention_inputs(batch.position_ids, small.config, path=path, cp_rank=0, cp=1, device=cpu)
    inputs |= {"position_ids": batch.position_ids} if path.kernel == VARLEN else {}
    before, peaks = [], []
    backwards: list[tuple[_Snapshot, _Snapshot]] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Allocations(fake) as allocations:
        materialize(small, device=cpu)
        allocations.mark([*small.parameters(), *small.buffers()], "parameters")

        def enter(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            if layer is layers[0] and given:  # or the embeddings, which the model holds on to, would count as kept
                given = given[0].clone(), *given[1:]
            peaks.append(_by_category(allocations.peak())["activations"])
            before.append(allocations.alive().get("activations", 0))
            allocations.start()
            return given

        def note_backward(*_: Any) -> None:
            backwards.append((allocations.peak(), allocations.snapshot()))
            allocations.start()

        def leave(_module: Any, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:  # else nothing so far learns
                hidden.register_hook(note_backward)

        for layer in layers:
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)
        name = backbone_name(small)
        hidden = getattr(small, name)(input_ids=fake.from_tensor(batch.input_ids), use_cache=False, **inputs)[0]
        hidden.sum().backward()
        note_backward()
        allocations.mark([parameter.grad for parameter in small.parameters()], "gradients")
    found = []
    for number in range(depth):
        kept = before[number + 1] - before[number]
        if depth - number + 1 >= len(backwards):
            found.append(_Counted(kept, peaks[number + 1] - before[number + 1], 0, 0))
            continue
        # Backward comes to the layers last to first; each one's peak is read where the next one begins.
        begun = _by_category(backwards[depth - number][1])
        highest = _by_category(backwards[depth - number + 1][0])
        more = {key: highest.get(key, 0) - begun.get(key, 0) for key in ("activations", "gradients")}
        found.append(_Counted(kept, peaks[number + 1] - before[number + 1], more["activations"], more["gradients"]))
    return found


def _or_learns(before: bool, module: nn.Module) -> bool:
    return before or any(parameter.requires_grad for parameter in module.parameters())


def _first_layers(model: PreTrainedModel, count: int) -> tuple[Any, list[nn.Module]]:
    """A copy of a meta model with its first ``count`` decoder layers alone."""
    small: Any = copy.deepcopy(model)
    layers = decoder_layers(small)
    names = {id(module): name for name, module in small.named_modules()}
    stack = small.get_submodule(names[id(layers[0])].rpartition(".")[0])
    config = small.config.get_text_config()
    del stack[count:]
    if len(stack) < count:  # what the last layer keeps is read where another one begins
        stack.append(copy.deepcopy(stack[-1]))
        config.layer_types = [*types, types[-1]] if (types := getattr(config, "layer_types", None)) else None
    config.num_hidden_layers = count
    return small, decoder_layers(small)


def _module_in(range_name: str) -> str:
    """``model.layers.3`` of ``FSDP::post_backward_accumulate (model.layers.3)``; "" for the root."""
    _, _, rest = range_name.partition("(")
    name = rest.rstrip(")")
    return "" if name in ("", "root") else name


def _make_state(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _mark_lasting(allocations: Allocations, model: nn.Module, optimizer: Any) -> None:
    allocations.mark([p for p in model.parameters() if hasattr(p, "device_mesh")], "parameters")
    allocations.mark(list(model.buffers()), "buffers")
    allocations.mark([p.grad for p in model.parameters() if hasattr(p.grad, "device_mesh")], "gradients")
    states = (value for state in optimizer.state.values() for value in state.values())
    allocations.mark(list(states), "optimizer")


def _inputs(config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan, mesh: Any) -> dict[str, Any]:
    batch = synthetic_batch(config.train.micro_batch_size, config.data.seq_len)
    inputs = build_shard_batch(model.config, path=plan.attention, mesh=mesh)(batch)
    if plan.attention.kernel != VARLEN:
        del inputs["position_ids"]  # transformers would look into them for the borders of documents
    return inputs


@contextlib.contextmanager
def _fake_group(world_size: int) -> Iterator[World]:
    assert not dist.is_initialized(), "a trace starts a process group of its own"
    dist.init_process_group("fake", rank=0, world_size=world_size, store=fake_store())
    try:
        yield World(0, world_size, 0, world_size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
