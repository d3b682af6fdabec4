"""Which kernel computes the loss on the head, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.liger import check_liger
from fsdp2kit.model.loss_head import has_linear_head
from fsdp2kit.model.loss_kernels import LossKernel

_KEY = "model.loss_kernel"


@dataclass(frozen=True)
class LossChoice:
    """What computes a model's loss; `choose_loss` decides it once."""

    kernel: LossKernel
    reason: str

    def __str__(self) -> str:
        name = "the model's own head, in chunks" if self.kernel == "own_head" else self.kernel
        return f"loss: {name} ({self.reason})"


def choose_loss(config: TrainingConfig, model: PreTrainedModel, *, device: torch.device | None) -> LossChoice:
    """What ``model.loss_kernel`` says. "auto" is our chunks: nothing else was faster where it was measured.

    Args:
        model: on meta or real; its head is tried on a tiny twin.
        device: where it will train; None: not known here.

    Raises:
        UserError: an explicit "torch" or "liger" that cannot be had here, for this model, dtype or data.
    """
    wanted = config.model.loss_kernel
    if wanted == "torch":
        _check_torch(config)
    elif wanted == "liger" and device is not None:
        check_liger(device, key=_KEY)
    is_linear = has_linear_head(model)
    if wanted in ("torch", "liger"):
        _check_any(config, model, is_linear=is_linear)
    if wanted == "torch":
        rounds = config.fsdp.param_dtype == "bfloat16"
        return LossChoice("torch", f"{_KEY}; it adds up the loss in bfloat16" if rounds else _KEY)
    if wanted == "liger":
        return LossChoice("liger", _KEY)
    if not is_linear:
        return LossChoice("own_head", "its logits are more than hidden @ weightᵀ")
    if wanted == "chunked":
        return LossChoice("chunked", _KEY)
    on_cpu = device is None or device.type == "cpu"
    why = "none faster was found on a CPU" if on_cpu else f"the others are not measured on a GPU; {_KEY} picks one"
    return LossChoice("chunked", f"auto: {why}")


def _check_torch(config: TrainingConfig) -> None:
    if not hasattr(F, "linear_cross_entropy"):
        what = f"'torch' with torch {torch.__version__}, which has no linear_cross_entropy"
        raise UserError(_KEY, what, "use torch 2.13 or later, or 'chunked'")
    if config.fsdp.param_dtype == "float16":
        what = "'torch' with fsdp.param_dtype = 'float16', in which its sum overflows at 65,504"
        raise UserError(_KEY, what, "use 'chunked', or bfloat16")


def _check_any(config: TrainingConfig, model: PreTrainedModel, *, is_linear: bool) -> None:
    """What neither torch's kernel nor Liger's can do."""
    wanted = config.model.loss_kernel
    if config.data.sources:
        what = f"{wanted!r} with data.sources, each of whose losses it cannot tell"
        raise UserError(_KEY, what, "use 'chunked'")
    if not is_linear:
        what = f"{wanted!r} with {type(model).__name__}, whose logits are more than hidden @ weightᵀ"
        raise UserError(_KEY, what, "use 'auto', which runs the model's own head in chunks")
