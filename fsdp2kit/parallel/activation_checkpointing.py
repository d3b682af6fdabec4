"""Recompute activations in backward instead of keeping them (arXiv:1604.06174)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.fsdp  # registers torch.ops.fsdp
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp2kit.config.schema import ActivationCheckpointingConfig
from fsdp2kit.parallel.expert_parallel.recomputation import routing_contexts
from fsdp2kit.weights.experts import find_experts

# Parts of operator names: attention by any kernel (torch's, ours, flash-attn's, flex), and matmuls with a weight.
# Batched matmuls are left out: in eager attention their results are the S² scores.
_ATTENTION = ("attention", "flash_attn", "flex")
_PRODUCTS = ("aten.mm", "aten.addmm", "aten._grouped_mm", "aten._scaled_mm")
_EXPERTS = "routed_experts"  # our operator
# What FSDP's hooks run to gather the parameters of a unit inside a layer. Selective checkpointing numbers the calls
# of each operator and fails where recomputation makes more of them than forward did; the hooks do, as recomputation
# starts in the middle of the model (pytorch#196862). None of them is ever kept.
_HOOKS_OF_FSDP = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
    torch.ops.c10d._allgather_base_.default,
    torch.ops.fsdp.all_gather_copy_in.default,
    torch.ops.fsdp.split_with_sizes_copy.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.view.default,
    torch.ops.aten.view.dtype,
}


def apply_activation_checkpointing(
    section: ActivationCheckpointingConfig, layers: Sequence[nn.Module], *, device_type: str, is_compiled: bool = False
) -> None:
    """Wrap every ``every``-th layer so that backward recomputes its forward, in whole or in part.

    The layer's ``forward`` is wrapped, not the layer: parameter names stay as they are, and FSDP's hooks, which
    sit around ``forward``, gather the parameters before the recomputation.

    Args:
        device_type: of the activations; on "cpu" they are on the host already, and ``offload`` does nothing.
        is_compiled: whether the layers are compiled. torch.compile traces selective checkpointing's contexts alone, so
            recomputation chooses experts again there.
    """
    if section.mode == "none":
        return
    offloads = section.offload and device_type != "cpu"
    for layer in layers[:: section.every]:
        experts = 0 if is_compiled else max((one.num_experts for one in find_experts(layer).values()), default=0)
        selective = section.mode == "selective"
        layer.forward = _recomputed(layer.forward, selective=selective, experts=experts, offload=offloads)


def _recomputed(forward: Callable[..., Any], *, selective: bool, experts: int, offload: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        SAC_IGNORED_OPS.update(_HOOKS_OF_FSDP)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_or_recompute)
    if experts:
        options["context_fn"] = functools.partial(routing_contexts, experts, options.get("context_fn"))

    # Around the checkpoint only the layer's inputs are saved, not parameters, which FSDP frees itself.
    inputs_kept = functools.partial(save_on_cpu, pin_memory=True) if offload else contextlib.nullcontext

    # torch.compile silently skips `checkpoint`, and all below it, where it is the outermost call. Inside another
    # function it is traced.
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        with inputs_kept():
            # RNG state is preserved (the default): with preflight.allow = ["dropout"] recomputation needs the same
            # masks.
            return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _keep_or_recompute(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep the results that are expensive, of attention and of matmuls with weights; recompute norms, activation
    functions and RoPE.

    That halves what is kept at almost no extra computation. Keeping only some of the matmuls was no better than
    checkpointing only some layers (``every``): docs/dev/checks.md.
    """
    name = str(operator)
    packet = operator.overloadpacket if hasattr(operator, "overloadpacket") else operator
    is_product = str(packet) in _PRODUCTS
    if is_product or _EXPERTS in name or any(word in name for word in _ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
