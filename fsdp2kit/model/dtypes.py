"""The dtype that transformers gives each tensor of a model whose weights are stored or computed in fewer bits.

Under ``from_pretrained(dtype=torch.bfloat16)`` not every tensor is bfloat16: a class names some that stay in float32
(``_keep_in_fp32_modules_strict``: biases of routers, for one), and creates others in float32 itself. Exports, weight
syncs, engines and the computation ask here.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from fsdp2kit.model.names import base_name, own_class


def tensor_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype that ``from_pretrained(dtype=dtype)`` gives each floating-point parameter and persistent buffer.

    transformers is asked: the model's class is built once more in ``dtype``, on meta.

    Args:
        model: on any device, sharded or not, with adapters or without; it remembers the answer.

    Returns:
        By name in a model without adapters, every tied name included.
    """
    found: dict[torch.dtype, dict[str, torch.dtype]] = vars(model).setdefault("_fsdp2kit_dtypes", {})
    if dtype not in found:
        with torch.device("meta"):
            built = own_class(model)._from_config(
                copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager"
            )
        tensors = {name: one for name, one in built.state_dict().items() if one.is_floating_point()}
        found[dtype] = {name: tensor.dtype for name, tensor in tensors.items()}
        # As transformers matches names when it loads; float16 keeps more of them than bfloat16.
        if plan := built._get_dtype_plan(dtype):
            pattern, globs, _ = build_glob_alternation(list(plan))
            matches = {name: match for name in tensors if (match := pattern.search(name))}
            found[dtype] |= {name: plan[globs[str(match.lastgroup)]] for name, match in matches.items()}
    return found[dtype]


def cast_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model's tensors the dtypes that ``from_pretrained(dtype=dtype)`` gives them, in place."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, wanted in tensor_dtypes(model, dtype).items():
        if name in tensors:
            tensors[name].data = tensors[name].data.to(wanted)


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """The parameters and persistent buffers that stay in float32 where others are ``dtype``, by the model's names."""
    if dtype == torch.float32:
        return set()
    wanted = tensor_dtypes(model, dtype)
    return {name for name in model.state_dict() if wanted.get(base_name(name) or "") == torch.float32}
