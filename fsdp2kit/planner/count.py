"""What a decoder layer keeps for backward, counted: one layer of each kind runs on tensors without memory.

Every operator allocates in `FakeTensorMode`, and nothing computes. The count does not see memory inside operators:
attention's kernels and exchanges.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import decoder_layers, materialize
from fsdp2kit.model.flops import head_widths
from fsdp2kit.model.inspect import backbone_name, value_of
from fsdp2kit.model.layer_functions import use_no_kernels
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.attention import use_attention, varlen_attention
from fsdp2kit.parallel.context_parallel.batch import attention_inputs
from fsdp2kit.parallel.context_parallel.layout import VARLEN
from fsdp2kit.parallel.low_bits import apply_nf4
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.activations import BackwardMemory, LayerMemory, is_flash, item_bytes, rank_tokens
from fsdp2kit.planner.allocations import Allocations, Snapshot, by_category
from fsdp2kit.planner.dispatch import partition_on_one_rank
from fsdp2kit.torch_compat import FakeTensorMode
from fsdp2kit.weights.modules import cast_model

_MOST_CALLS = 15_000
"""Calls of torch in a pass over a few layers. So many take about ten seconds."""


class Counted(NamedTuple):
    """Bytes of one layer in a pass."""

    kept: int
    """Between its forward and its backward."""
    forward: int
    """The most at once in forward, beside ``kept``."""
    backward: int
    """The most at once in backward, beside what is there when it begins."""
    gradients: int
    """Bytes of its weights' gradients at that moment of backward."""


class _Bounded(TorchFunctionMode):
    """Raises ``refusal`` after too many calls of torch.

    It counts functions and not operators: an error while an operator is dispatched may end the process.
    """

    def __init__(self, refusal: UserError) -> None:
        super().__init__()
        self._refusal = refusal
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise self._refusal
        return func(*args, **(kwargs or {}))


def count_layers(config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan) -> list[LayerMemory]:
    """Every decoder layer's memory, counted on one layer of each kind in a pass over fake tensors.

    The kernel is the plan's; its exchanges are left out. Layers that go through their tokens in a loop are refused:
    counting them would take minutes.
    """
    kinds = _kinds_of(model)
    firsts = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    depth = max(firsts.values()) + 1
    text = model.config.get_text_config()
    section = plan.activation_checkpointing
    modes = {"none": False, section.mode: True}
    counted = {mode: _count(config, model, plan, depth=depth, checkpointed=on) for mode, on in modes.items()}
    item = rank_tokens(config, plan) * item_bytes(plan.fsdp.param_dtype)
    hidden = item * int(text.hidden_size)
    exchanged = 0
    if plan.attention.method == "ulysses" and is_flash(plan.attention.kernel):
        # What comes back from the exchange is another tensor than what the kernel keeps.
        exchanged = item * text.num_attention_heads * head_widths(text)[1]
    found = []
    for number, kind in enumerate(kinds):
        kept, forward, backward, gradients = counted["none"][firsts[kind]]
        kept += exchanged
        recomputed = 0
        on_host = 0
        if section.mode != "none" and number % section.every == 0:
            everything = kept + hidden * (2 if section.mode == "selective" else 1)
            kept, forward, *_ = counted[section.mode][firsts[kind]]
            recomputed = max(0, everything - kept)
            if section.offload and plan.device_type != "cpu":
                kept -= hidden
                on_host = hidden
        begin = BackwardMemory("begin", kept + recomputed, 0)
        # The gradient of the layer's output was there before its backward began.
        peak = BackwardMemory("peak", kept + recomputed + backward + hidden, gradients)
        found.append(LayerMemory(kept, on_host, recomputed, forward, (begin, peak)))
    return found


def _kinds_of(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """What tells one decoder layer's memory from another's, by layer."""
    layers = decoder_layers(model)
    types = value_of(model.config.get_text_config(), "layer_types") or [""] * len(layers)
    # The first layer that learns hands on no gradient if all before it is frozen.
    modules = [model.get_input_embeddings(), *layers]
    trained = [any(parameter.requires_grad for parameter in module.parameters()) for module in modules]
    learns_before = itertools.accumulate(trained, operator.or_)
    return [
        (type(layer), kind, str([tuple(p.shape) for p in layer.parameters()]), before)
        for layer, kind, before in zip(layers, types, learns_before, strict=False)
    ]


def _count(
    config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan, *, depth: int, checkpointed: bool
) -> list[Counted]:
    """Run the first ``depth`` layers forward and backward, and count each one's bytes."""
    names = ", ".join(sorted({type(layer).__name__ for layer in decoder_layers(model)}))
    what = f"the memory of {names} is not planned: it goes through its tokens in a loop, for lack of a kernel"
    bounded = _Bounded(UserError("data.seq_len", f"{config.data.seq_len} tokens: {what}", "plan a shorter length"))
    # The layer after them, if there is one: where it begins, all that is passing of the one before is gone.
    small, layers = _first_layers(model, depth + 1)
    inputs = _make_ready(config, small, plan, checkpointed=layers if checkpointed else [])
    # Where each layer begins and the last one ends: kept so far; the most at once since the entry before, beside it.
    entries: list[tuple[int, int]] = []
    # Where a layer's backward begins: the peak before it; what is left.
    backwards: list[tuple[Snapshot, Snapshot]] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Allocations(fake) as allocations, bounded:
        materialize(small, device=torch.device("cpu"))
        allocations.mark([*small.parameters(), *small.buffers()], "parameters")

        def enter(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            if layer is layers[0] and given:  # else the embeddings, which the model holds on to, would count as kept
                given = given[0].clone(), *given[1:]
                if given[0].requires_grad:  # else the embeddings' gradient would count as the first layer's
                    given[0].register_hook(note_backward)
            note_forward()
            return given

        def note_forward() -> None:
            kept = by_category(allocations.snapshot())["activations"]
            entries.append((kept, by_category(allocations.peak())["activations"] - kept))
            allocations.start()

        def note_backward(*_: Any) -> None:
            backwards.append((allocations.peak(), allocations.snapshot()))
            allocations.start()

        def leave(layer: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:  # else nothing so far learns
                hidden.register_hook(note_backward)
            if layer is layers[-1]:
                note_forward()

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
        before, _ = entries[number]
        kept, forward = entries[number + 1]
        more = Counter[str]()
        end = len(layers) - number  # backward comes to the layers last to first
        if end < len(backwards):
            more = by_category(backwards[end][0])
            more.subtract(by_category(backwards[end - 1][1]))
        found.append(Counted(kept - before, forward, more["activations"], more["gradients"]))
    return found


def _make_ready(
    config: TrainingConfig, small: Any, plan: ParallelPlan, *, checkpointed: list[nn.Module]
) -> dict[str, Any]:
    """Apply the plan to a model on meta, without sharding and exchanges.

    Returns:
        A micro-batch as the model takes it: each row is one document.
    """
    dtype = getattr(torch, plan.fsdp.param_dtype)
    small.to(dtype)
    cast_model(small, dtype)  # some of it stays in float32
    use_no_kernels(small)
    if plan.nf4 is not None:
        apply_nf4(plan.nf4, small)
    if plan.experts is not None:
        partition_on_one_rank(small, plan)
    path = plan.attention
    masks = path.masks_every_row or path.recurrent_layers > 0  # beside recurrent layers, attention gets our masks
    path = replace(path, method=None, recurrent_layers=0, masks_every_row=masks)
    if path.kernel == VARLEN:
        use_attention(small, varlen_attention)
    if checkpointed:
        apply_activation_checkpointing(plan.activation_checkpointing, checkpointed, device_type="cpu")
    ids = torch.zeros(config.train.micro_batch_size, config.data.seq_len // plan.sizes.cp, dtype=torch.int64)
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    inputs = attention_inputs(positions, small.config, path=path, cp_rank=0, cp=1, device=torch.device("cpu"))
    inputs |= {"position_ids": positions} if path.kernel == VARLEN else {}
    return {"input_ids": ids, **inputs}


def _first_layers(model: PreTrainedModel, count: int) -> tuple[Any, list[nn.Module]]:
    """A copy of a meta model with its first ``count`` decoder layers alone (or all), and those layers."""
    small: Any = copy.deepcopy(model)
    layers = decoder_layers(small)
    names = {id(module): name for name, module in small.named_modules()}
    stack = small.get_submodule(names[id(layers[0])].rpartition(".")[0])
    del stack[count:]
    small.config.get_text_config().num_hidden_layers = len(stack)
    return small, decoder_layers(small)
