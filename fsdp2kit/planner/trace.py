"""The other way to the same figures: run the real modules on tensors without memory, and add up what they allocate.

`trace_step` builds the model as a run does, shards it over a fake process group, and runs a step in `FakeTensorMode`:
every operator allocates, nothing computes. `count_layers` does it with one layer of each kind.

What it cannot see: memory that operators use inside themselves (attention's kernels and exchanges).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdp2kit.config.checks import MeshSizes, resolve_accumulation
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.data.loader import Batch
from fsdp2kit.distributed import World
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, decoder_layers, materialize
from fsdp2kit.model.dtypes import cast_model
from fsdp2kit.model.flops import head_widths
from fsdp2kit.model.inspect import backbone_name
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.attention import use_attention, varlen_attention
from fsdp2kit.parallel.context_parallel.batch import attention_inputs, build_slice_batch
from fsdp2kit.parallel.context_parallel.layout import VARLEN
from fsdp2kit.parallel.low_bits import apply_nf4
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import ParallelPlan, plan_parallel
from fsdp2kit.planner.activations import BackwardMemory, LayerMemory, is_flash, item_bytes
from fsdp2kit.planner.allocations import Allocations, Snapshot, by_category
from fsdp2kit.torch_compat import (
    FakeTensorMode,
    accumulated_gradients,
    accumulated_partial_sums,
    accumulated_shards,
    fake_store,
)


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
    """An objective with the memory of those that are made of tokens' log-probabilities."""
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

    Raises:
        UserError: an optimizer that cannot be traced.
    """
    if config.optimizer.name in ("adamw_bf16", "adamw_8bit"):
        what = f"optimizer.name = {config.optimizer.name!r}, which looks at values that a trace does not have"
        raise UserError("--trace", what, "add optimizer.name=adamw")
    with _fake_group(sizes.world_size) as world:
        # What is "auto" there was decided with the ranks of a node, which the fake group does not know.
        mesh = build_mesh(config.mesh.model_copy(update=asdict(sizes)), config.fsdp, world=world)
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
            # What `accumulate` reads of a global batch.
            batch = SimpleNamespace(
                micro_batches=[None] * min(count, 2), num_items=train.micro_batch_size * config.data.seq_len
            )
            peaks: dict[str, dict[str, int]] = {}

            def end(name: str) -> None:
                _mark_lasting(allocations, model, optimizer)
                peaks[name] = by_category(allocations.peak())
                allocations.start()

            allocations.on_range = partial(_mark_gradients, allocations, model)
            allocations.start()
            accumulate(model, batch, shard=lambda _: dict(fakes), fsdp=config.fsdp, mesh=mesh, end_phase=end)
            allocations.start("optimizer")
            optimizer.step()
            end("optimizer")
    return peaks


def _mark_gradients(allocations: Allocations, model: Any, name: str) -> None:
    """File a unit's gradients when their reduction begins: ``FSDP::post_backward_accumulate (model.layers.3)``."""
    if name.startswith("FSDP::post_backward_accumulate"):
        module = name.partition("(")[2].rstrip(")")
        unit = model if module in ("", "root") else model.get_submodule(module)  # nothing, in some versions
        gradients = [p.grad for p in unit.parameters()], accumulated_gradients(unit)
        allocations.mark(itertools.chain(*gradients), "unsharded gradients")


_MOST_CALLS = 15_000
"""Of torch in a pass over a few layers: some ten seconds."""


class _Bounded(TorchFunctionMode):
    """Ends what calls torch too often. Not where operators are dispatched: an error there may end the process."""

    def __init__(self, refusal: UserError) -> None:
        super().__init__()
        self._refusal, self._calls = refusal, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise self._refusal
        return func(*args, **(kwargs or {}))


def count_layers(config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan) -> list[LayerMemory]:
    """Every decoder layer's memory, counted on one layer of each kind in a pass over fake tensors.

    The kernel is the plan's; its exchanges are left out.

    Raises:
        UserError: layers that go through their tokens in a loop, which would be counted for minutes.
    """
    layers = decoder_layers(model)
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    # The first that learns has no gradient to hand on, if what is before it is frozen.
    modules = [model.get_input_embeddings(), *layers]
    trained = [any(parameter.requires_grad for parameter in module.parameters()) for module in modules]
    learns = itertools.accumulate(trained, operator.or_)
    kinds = [
        (type(layer).__name__, kind, str([tuple(p.shape) for p in layer.parameters()]), before)
        for layer, kind, before in zip(layers, types, learns, strict=False)
    ]
    firsts = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    depth = max(firsts.values()) + 1
    modes = {"none": False, plan.activation_checkpointing.mode: True}
    counted = {mode: _count(config, model, plan, depth=depth, checkpointed=on) for mode, on in modes.items()}
    tokens = config.train.micro_batch_size * config.data.seq_len // plan.sizes.cp
    text, section = model.config.get_text_config(), plan.activation_checkpointing
    item = tokens * item_bytes(plan.fsdp.param_dtype)
    hidden, exchanged = item * int(text.hidden_size), 0
    if plan.attention.method == "ulysses" and is_flash(plan.attention.kernel):
        # What comes back from the exchange is another tensor than what the kernel keeps.
        exchanged = item * text.num_attention_heads * head_widths(text)[1]
    found = []
    for number, kind in enumerate(kinds):
        kept, forward, backward, gradients = counted["none"][firsts[kind]]
        kept += exchanged
        recomputed, on_host = 0, 0
        if section.mode != "none" and number % section.every == 0:
            everything = kept + hidden * (2 if section.mode == "selective" else 1)
            kept, forward, *_ = counted[section.mode][firsts[kind]]
            recomputed = max(0, everything - kept)
            if section.offload and plan.device_type != "cpu":
                kept, on_host = kept - hidden, hidden
        begin = BackwardMemory("begin", kept + recomputed, 0)
        # The gradient that it is given was there before.
        peak = BackwardMemory("peak", kept + recomputed + backward + hidden, gradients)
        found.append(LayerMemory(kept, on_host, recomputed, forward, (begin, peak)))
    return found


def _count(
    config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan, *, depth: int, checkpointed: bool
) -> list[tuple[int, int, int, int]]:
    """Bytes of each of the first ``depth`` layers: kept; more than that at once in forward; more than at its beginning
    at once in backward; gradients of its weights at that moment."""
    names = ", ".join(sorted({type(layer).__name__ for layer in decoder_layers(model)}))
    what = f"the memory of {names} is not planned: it goes through its tokens in a loop, for lack of a kernel"
    bounded = _Bounded(UserError("data.seq_len", f"{config.data.seq_len} tokens: {what}", "plan a shorter length"))
    small, layers = _first_layers(model, depth + 1)
    inputs = _make_ready(config, small, plan, checkpointed=layers if checkpointed else [])
    entries: list[tuple[int, int]] = []
    backwards: list[tuple[Snapshot, Snapshot]] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Allocations(fake) as allocations, bounded:
        materialize(small, device=torch.device("cpu"))
        allocations.mark([*small.parameters(), *small.buffers()], "parameters")

        def enter(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            if layer is layers[0] and given:  # or the embeddings, which the model holds on to, would count as kept
                given = given[0].clone(), *given[1:]
                if given[0].requires_grad:  # the embeddings' own gradient is none of the first layer's
                    given[0].register_hook(note_backward)
            kept = by_category(allocations.snapshot())["activations"]
            entries.append((kept, by_category(allocations.peak())["activations"] - kept))
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
        ids = fake.from_tensor(inputs.pop("input_ids"))
        hidden = getattr(small, backbone_name(small))(input_ids=ids, use_cache=False, **inputs)[0]
        hidden.sum().backward()
        note_backward()
        allocations.mark([parameter.grad for parameter in small.parameters()], "gradients")
    found = []
    for number in range(depth):
        (before, _), (kept, forward), more = entries[number], entries[number + 1], Counter[str]()
        if depth - number + 1 < len(backwards):
            # Backward comes to the layers last to first; each one's peak is read where the next one begins.
            more = by_category(backwards[depth - number + 1][0])
            more.subtract(by_category(backwards[depth - number][1]))
        found.append((kept - before, forward, more["activations"], more["gradients"]))
    return found


def _make_ready(
    config: TrainingConfig, small: Any, plan: ParallelPlan, *, checkpointed: list[nn.Module]
) -> dict[str, Any]:
    """Give a model on meta what the plan says, but for sharding and exchanges.

    Returns:
        A micro-batch as the model takes it.
    """
    dtype = getattr(torch, plan.fsdp.param_dtype)
    small.to(dtype)
    cast_model(small, dtype)  # some of it stays in float32
    if plan.nf4 is not None:
        there = dict(small.named_modules())
        apply_nf4(replace(plan.nf4, names=tuple(name for name in plan.nf4.names if name in there)), small)
    path = replace(plan.attention, method=None)
    if path.kernel == VARLEN:
        use_attention(small, varlen_attention)
    if checkpointed:
        apply_activation_checkpointing(plan.activation_checkpointing, checkpointed, device_type="cpu")
    length = config.data.seq_len // plan.sizes.cp
    batch = synthetic_batch(config.train.micro_batch_size, length)
    inputs = attention_inputs(batch.position_ids, small.config, path=path, cp_rank=0, cp=1, device=torch.device("cpu"))
    inputs |= {"position_ids": batch.position_ids} if path.kernel == VARLEN else {}
    return {"input_ids": batch.input_ids, **inputs}


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


def _mark_lasting(allocations: Allocations, model: nn.Module, optimizer: Any) -> None:
    allocations.mark((p for p in model.parameters() if hasattr(p, "device_mesh")), "parameters")
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
def _fake_group(world_size: int) -> Iterator[World]:
    assert not dist.is_initialized(), "a trace starts a process group of its own"
    dist.init_process_group("fake", rank=0, world_size=world_size, store=fake_store())
    try:
        yield World(0, world_size, 0, world_size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
