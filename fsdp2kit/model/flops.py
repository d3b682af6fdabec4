"""Model FLOPs of a step, and the peak of a device: MFU (arXiv:2204.02311, appendix B) is their quotient.

FLOPs are those of the model, not of the hardware: recomputation by activation checkpointing does not count.

- Matrices: 2 FLOPs a token for each parameter that multiplies in forward, and twice that in backward (gradients of
  inputs and of weights): 6 × parameters × tokens (arXiv:2001.08361, section 2.1). A frozen parameter has no gradient,
  and counts 4. If a module is trained whole beside adapters, only the copy counts. Embedding look-ups multiply
  nothing; an output head does, and counts once if it is tied to the embedding. Norm scales and biases are left out.
- Experts: the share that one token visits, ``num_experts_per_tok`` ÷ number of experts. Shared experts count in full.
- Attention: QKᵀ and AV are 2 FLOPs each for every query-key pair, head and channel; causality leaves half of the
  len² pairs of a document; backward is twice the forward. So 3 × 2 × (qk + v channels) × heads × layers × Σ len² ÷ 2.
  Sliding-window, chunked and sparse attention count as full attention, so their MFU comes out too high; attention
  sinks are not counted.
- States: by the recurrence, whatever a kernel does in chunks, for each token and head with a state of k × v numbers.
  The gated delta rule (arXiv:2412.06464, equation 10) reads a value, writes a correction and reads the output: 6·k·v.
  Mamba-2 (arXiv:2405.21060, section 3.1) writes and reads: 4·k·v. Backward is twice the forward. Other recurrences
  (Mamba, RWKV) are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp2kit.model.inspect import value_of
from fsdp2kit.weights.experts import expert_count, experts_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Layer types (transformers' names) that have no softmax attention.
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "conv", "moe", "mlp"}

# Dense bf16 FLOP/s with fp32 accumulation, from the vendors' data sheets (half of a figure "with sparsity"), and the
# devices that have it. All words of a kind must be in the device's name; the kind with the most words is taken.
_PEAK_TERAFLOPS: dict[float, tuple[str, ...]] = {
    2500: ("GB300", "GB200"),
    2250: ("B300", "B200"),
    989.4: ("GH200", "H200", "H100", "H800"),
    835: ("H200 NVL", "H100 NVL"),
    756: ("H100 PCIe", "H800 PCIe"),
    148: ("H20",),
    312: ("A100", "A800"),
    165: ("A30",),
    154.8: ("A6000",),
    149.7: ("A40",),
    125: ("A10",),
    70: ("A10G",),
    362: ("L40S",),
    181: ("L40",),
    121: ("L4",),
    119.5: ("L20",),
    364.2: ("6000 Ada",),
    209.5: ("RTX 5090",),
    165.2: ("RTX 4090",),
    71: ("RTX 3090",),
    2516.6: ("MI355X",),
    2306.9: ("MI350X",),
    1307.4: ("MI325X", "MI300X"),
    191.5: ("MI250X",),  # one of its two dies, which torch shows as a device each
}

# Variants of the devices above with other, unlisted peaks.
_OTHER_VARIANTS = {"MIG", "Laptop", "Max-Q", "D"}


@dataclass(frozen=True)
class ModelFlops:
    """What a model's FLOPs depend on, read off it once.

    Attributes:
        parameters: parameters that multiply each token; experts count by their active share (NaN if that is unknown),
            frozen ones by two thirds.
        attention_per_pair: forward FLOPs of all layers' attention for one query-key pair.
        states_per_token: forward FLOPs of all linear-attention and Mamba-2 layers' states for one token.
    """

    parameters: float
    attention_per_pair: float
    states_per_token: float = 0.0


def count_model_flops(model: PreTrainedModel) -> ModelFlops:
    """Read the counts off a transformers causal LM; it may be on the meta device or sharded."""
    config = model.config.get_text_config()
    per_pair = math.fsum(_layer_flops_per_pair(layer) for layer in attention_layers(config).values())
    return ModelFlops(_active_parameters(model, config), per_pair, sum(map(_state_flops, model.modules())))


def flops_per_batch(counts: ModelFlops, *, tokens: int, attention_pairs: int) -> float:
    """Model FLOPs, forward and backward, of a batch (the formula stands at the top of this file).

    Args:
        counts: of `count_model_flops`.
        tokens: input tokens, without padding.
        attention_pairs: Σ len² over the documents of the batch (not halved).

    Returns:
        FLOPs; NaN for a mixture of experts whose config does not say how many experts a token visits.
    """
    of_token = 6 * counts.parameters + 3 * counts.states_per_token
    return of_token * tokens + 3 * counts.attention_per_pair * attention_pairs / 2


def device_peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a device in FLOP/s; None for the CPU and for a device that the table does not know."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """`device_peak_flops` by the name that the driver gives, e.g. ``NVIDIA H100 80GB HBM3``."""
    words = set(name.replace("-", " ").split()) | set(name.split())
    if words & _OTHER_VARIANTS:
        return None
    kinds = [(kind.split(), peak) for peak, kinds in _PEAK_TERAFLOPS.items() for kind in kinds]
    fitting = [(len(kind), peak) for kind, peak in kinds if words.issuperset(kind)]
    return max(fitting)[1] * 1e12 if fitting else None


def _active_parameters(model: PreTrainedModel, config: PreTrainedConfig) -> float:
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        looked_up.discard(id(head.weight))  # tied: it is looked up and multiplies
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    experts = expert_count(config)
    dense = 0.0
    routed = 0.0
    for name, parameter in model.named_parameters():  # names a tied parameter once
        if parameter.ndim < 2 or name.endswith("bias") or id(parameter) in looked_up or ".original_module." in name:
            continue
        multiplications = parameter.numel() * (1.0 if parameter.requires_grad else 2 / 3)
        # Fused experts are one parameter (experts, out, in); some models keep them outside a module called "experts".
        fused = parameter.ndim == 3 and parameter.shape[0] == experts and id(parameter) not in convolutions
        if fused or "experts" in name.split("."):
            routed += multiplications
        else:
            dense += multiplications
    if not routed:
        return dense
    visited = experts_per_token(config)
    if visited is None or not isinstance(experts, int):
        return math.nan  # a guess would be reported as if it were a measurement
    return dense + routed * visited / experts


def attention_layers(config: PreTrainedConfig) -> dict[int, PreTrainedConfig]:
    """The config of each layer with softmax attention, by number; in Gemma 4, for one, their heads differ.

    Args:
        config: of the text model.
    """
    kinds = value_of(config, "layer_types") or value_of(config, "layers_block_type")
    kinds = kinds or ["full_attention"] * config.num_hidden_layers
    each = config.per_layer_config if value_of(config, "is_heterogeneous") else [config] * len(kinds)
    layers = enumerate(zip(each, kinds, strict=True))
    return {number: layer for number, (layer, kind) in layers if kind not in _WITHOUT_ATTENTION}


def head_widths(config: PreTrainedConfig) -> tuple[int, int]:
    """Widths of a head's keys and of its values, which differ in latent attention (DeepSeek)."""
    head_dim = value_of(config, "head_dim") or config.hidden_size // config.num_attention_heads
    return value_of(config, "qk_head_dim") or head_dim, value_of(config, "v_head_dim") or head_dim


def _layer_flops_per_pair(config: PreTrainedConfig) -> float:
    heads = value_of(config, "num_attention_heads")
    if not heads:
        return 0.0  # Mamba, RWKV
    return 2.0 * sum(head_widths(config)) * heads


def _state_flops(module: nn.Module) -> float:
    """A layer's forward FLOPs a token for its state; transformers' layers of a kind name their sizes alike."""
    delta = ("num_v_heads", "head_k_dim", "head_v_dim")
    mamba2 = ("num_heads", "ssm_state_size", "head_dim")
    for cost, names in ((6, delta), (4, mamba2)):
        sizes = [size for name in names if isinstance(size := getattr(module, name, None), int)]
        if len(sizes) == len(names):
            return float(cost * math.prod(sizes))
    return 0.0
