"""Whether a model's recurrent layers can keep documents apart and share out their heads, tried on its small copy."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.inspect import Traits
from fsdp2kit.model.layer_functions import functions_of, transformers_own, use_functions
from fsdp2kit.parallel.context_parallel.batch import attention_inputs
from fsdp2kit.parallel.context_parallel.layout import AttentionPath
from fsdp2kit.parallel.context_parallel.recurrent import (
    CONVOLUTION,
    FUSED,
    SCANS,
    Exchange,
    RecurrentShape,
    apply_recurrent,
    find_recurrent,
)


def plan_recurrent(config: TrainingConfig, model: PreTrainedModel, traits: Traits, *, cp: int) -> int:
    """How many recurrent layers get documents of their own or whole sequences; 0: none needs to.

    Raises:
        UserError: a layer's heads are fewer than ranks, or chunks shorter than its convolution.
    """
    found = find_recurrent(model)
    if not found or not (config.data.pack or cp > 1) or try_recurrent(model, traits, cp=cp):
        return 0  # what cannot be is refused by the kinds of layers that are left
    if config.compile.enabled:
        what = "true with recurrent layers, whose documents are laid out anew for every batch"
        raise UserError("compile.enabled", what, "set it to false, or data.pack = false with mesh.cp = 1")
    for shape in {measure(module, model) for module in found.values()} if cp > 1 else ():
        if shape.heads and shape.heads < cp:
            what = f"{cp} is more than the {shape.heads} heads of its recurrent layers"
            raise UserError("mesh.cp", what, f"use mesh.cp ≤ {shape.heads}")
        if config.data.seq_len // (2 * cp) < shape.kernel - 1:
            what = f"{config.data.seq_len} tokens over {2 * cp} chunks are fewer a chunk than a convolution sees"
            raise UserError("data.seq_len", what, f"use at least {2 * cp * (shape.kernel - 1)}, or a smaller mesh.cp")
    return len(found)


def try_recurrent(model: PreTrainedModel, traits: Traits, *, cp: int = 1) -> str | None:
    """Why the recurrent layers cannot keep packed documents apart. None: they can, or the model has no such layers."""
    if not find_recurrent(model):
        return None
    return traits.no_small_copy or traits.once(("recurrent", cp), partial(_find_leak, cp=cp))


@torch.no_grad()
def _find_leak(small: PreTrainedModel, *, cp: int) -> str | None:
    """Compare packed documents with each alone, scanned with a share of the heads at a time; then change one."""
    ids = torch.arange(2, 34)[None]
    positions = torch.cat([torch.arange(n) for n in (11, 13, 8)])[None]
    other = torch.where((positions == 0).cumsum(1) == 2, ids + 1, ids)
    path = AttentionPath(None, "eager", recurrent_layers=1)
    extra = attention_inputs(positions, small.config, path=path, cp_rank=0, cp=1, device=ids.device)
    try:
        alone = torch.cat([small(input_ids=part, use_cache=False).logits for part in ids.split([11, 13, 8], dim=1)], 1)
        shapes = [measure(module, small) for module in find_recurrent(small).values()]
        heads = min((shape.heads for shape in shapes if shape.heads), default=1)
        apply_recurrent(small, Exchange(shares=min(cp, heads)))
        packed, changed = (
            small(input_ids=each, position_ids=positions, use_cache=False, **extra).logits for each in (ids, other)
        )
    except Exception as error:  # whatever the architecture raises
        if "need `borders`" in str(error):
            return "packed documents would see each other: its layers hand no borders on to their convolution"
        what = f"its recurrent layers do not run with documents' borders ({type(error).__name__})"
        return f"packed documents would see each other: {what}"
    scale = alone.abs().max()
    if not (packed - alone).abs().max() <= 1e-4 * scale:
        return "packed documents would see each other"
    moved = (packed - changed).abs().amax(2)[(ids == other)]
    if not moved.max() <= 1e-6 * scale:  # experts add up other tokens' rows in another order
        return "packed documents would see each other"
    return None


def measure(module: nn.Module, model: PreTrainedModel, *, dtype: torch.dtype = torch.float32) -> RecurrentShape:
    """The shapes that a recurrent module's functions are given, by a forward pass on meta.

    Args:
        dtype: of its computation.
    """
    stand_in = copy.deepcopy(module).to("meta", dtype)
    own = {name: transformers_own(each) for name, each in functions_of(module).items()}
    found: dict[str, int] = {}

    def convolve(hidden_states: Any, weight: Any, bias: Any = None, activation: Any = None, **_: Any) -> Any:
        found["kernel"] = weight.shape[-1]
        found["channels"] = weight.shape[0] * hidden_states.element_size()
        return hidden_states

    def scan(name: str, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(inspect.signature(own[name]).parameters, args, strict=False)), **kwargs}
        heads, groups = ([given[one] for one in names] for names in (SCANS[name].heads, SCANS[name].groups))
        found["heads"] = heads[0].shape[2]
        found["groups"] = groups[0].shape[2] if groups else found["heads"]
        found["of_head"] = sum(tensor[0, 0, 0].nbytes for tensor in heads)
        found["of_group"] = sum(tensor[0, 0, 0].nbytes for tensor in groups)
        found["dtypes"] = len({tensor.dtype for tensor in heads + groups})
        result = own[name](*args, **kwargs)
        found["of_output"] = (result[0] if isinstance(result, tuple) else result)[0, 0, 0].nbytes
        return result

    scans = {name: partial(scan, name) for name in SCANS if name in own}
    use_functions(stand_in, {CONVOLUTION: convolve, FUSED: lambda *_, **__: None, **scans})
    hidden = torch.empty((1, 8, model.config.get_text_config().hidden_size), dtype=dtype, device="meta")
    stand_in.forward(hidden)
    return RecurrentShape(**found)
