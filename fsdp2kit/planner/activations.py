"""What a decoder layer keeps for backward, in bytes: closed forms for the usual block.

A layer is a usual block if it computes what Llama's does: root-mean-square norms before attention and before a gated
MLP, with or without norms of queries and keys. docs/dev/memory.md derives the forms; count.py counts other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.parallel.context_parallel.exchange import share_heads
from fsdp2kit.parallel.context_parallel.layout import VARLEN
from fsdp2kit.parallel.plan import ParallelPlan

LSE_BYTES = 4  # a log-sum-exp for each query and head, float32


class BackwardMemory(NamedTuple):
    """Bytes of one decoder layer at one moment of its backward."""

    where: str
    held: int
    """Its kept and recomputed tensors that are not freed yet, and gradients of activations."""
    gradients: int
    """Gradients of its weights that are there already."""
    inside: int = 0
    """What an exchange of experts' tokens holds beside that."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one decoder layer on one rank, for one micro-batch."""

    kept: int = 0
    """Between its forward and its backward."""
    kept_on_host: int = 0
    """The same, in host memory (``activation_checkpointing.offload``)."""
    recomputed: int = 0
    """What recomputation adds before its backward begins."""
    forward: int = 0
    """The most at once in forward, beside ``kept``: results that are dropped at once."""
    backward: tuple[BackwardMemory, ...] = ()
    """The moments of its backward that may hold the most, in order."""
    attention_forward: int = 0
    """What attention's kernel and exchange, or experts', hold while they run in forward, beside ``kept``."""


@dataclass(frozen=True)
class BlockShape:
    """Widths of the usual decoder block, in elements a token."""

    hidden: int
    queries: int
    """Query heads × their width."""
    keys: int
    """Key heads × their width; values are as wide."""
    heads: int
    intermediate: int
    norms_of_heads: int
    """Elements that go through norms of queries and keys (Qwen3); 0 without such norms."""


def block_shape(layer: nn.Module) -> BlockShape | None:
    """The widths of a layer that is a usual block; None for any other."""
    parts: dict[str, Any] = {
        name: module for name, module in layer.named_modules() if next(module.parameters(), None) is not None
    }
    linear = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    norms = {"input_layernorm", "post_attention_layernorm"}
    of_heads = {"self_attn.q_norm", "self_attn.k_norm"}
    names = set(parts) - {"", "self_attn", "mlp"}
    if names not in (linear | norms, linear | norms | of_heads):
        return None
    if not all(isinstance(parts[name], nn.Linear) for name in linear):
        return None
    # transformers repeats code: equal instructions compute the same.
    alike = {**dict.fromkeys(names - linear, LlamaRMSNorm), "mlp": LlamaMLP}
    for name, like in alike.items():
        code = type(parts[name]).forward.__code__
        other = like.forward.__code__
        if (code.co_code, code.co_names) != (other.co_code, other.co_names):
            return None
    queries, keys, values = (parts[f"self_attn.{name}_proj"].out_features for name in "qkv")
    width = vars(parts["self_attn"]).get("head_dim")
    if not width or values != keys:
        return None
    gate = parts["mlp.gate_proj"]
    normed = queries + keys if of_heads <= names else 0
    return BlockShape(gate.in_features, queries, keys, queries // width, gate.out_features, normed)


def layer_memory(shape: BlockShape, plan: ParallelPlan, *, tokens: int, checkpointed: bool) -> LayerMemory:
    """The closed forms for a usual block with ``tokens`` tokens on this rank.

    Args:
        checkpointed: whether this layer is one of those that ``activation_checkpointing`` is applied to.
    """
    section = plan.activation_checkpointing
    c = item_bytes(plan.fsdp.param_dtype)
    h = shape.hidden
    i = shape.intermediate
    q = shape.queries
    kv = 2 * shape.keys
    cp = plan.sizes.cp
    method = plan.attention.method
    own_q = q
    own_kv = kv
    heads = shape.heads
    if method == "ulysses":
        # The heads of the rank with the most of them, over the whole sequence.
        shares = share_heads(shape.heads, shape.keys * shape.heads // q, cp)
        share = max(shares, key=lambda share: len(share.query) + 2 * len(share.key))
        width = q // shape.heads * cp
        heads = cp * len(share.query)
        own_q = width * len(share.query)
        own_kv = 2 * width * len(share.key if share.groups else share.query)
    out = c * own_q + LSE_BYTES * heads
    attended = c * (own_q + own_kv) + out
    if method == "ulysses":  # the result comes back in a new tensor
        attended += c * q
    # A norm keeps its float32 input and what it divided; its output is kept as the input of linear layers.
    norms = 2 * (4 + c) * h + 2 * c * h + (4 + c) * shape.norms_of_heads
    everything = norms + attended + 4 * c * i  # gate, its activation, up, their product
    kept = everything
    on_host = 0
    recomputed = 0
    if checkpointed and section.mode != "none":
        kept = c * h  # the layer's input
        if section.mode == "selective":  # results of all matmuls with weights, and of attention
            kept += c * (q + kv + h) + out + c * (2 * i + h)
        recomputed = everything + c * h + (c * h if section.mode == "selective" else 0) - kept
        if section.mode == "full" and section.offload and plan.device_type != "cpu":
            kept = 0
            on_host = c * h
    exchange_forward, exchange_backward = _exchange(method, c * kv, 4 * kv, c * q, cp=cp)
    own_kernel = plan.attention.kernel == VARLEN
    # Our kernel sums the blocks' results in float32.
    kernel_forward = (8 + 2 * c) * q if own_kernel else 0
    kernel_backward = (4 + 2 * c) * (q + kv) if own_kernel else c * (q + kv)
    forward = 3 * c * i + 2 * c * h if kept < everything else c * h
    whole = kept + on_host + recomputed
    # From the last part of the layer to the first: each moment has fewer activations, and gradients of more weights.
    of_mlp = 3 * c * h * i
    of_output = c * h * q
    attention = max(0, whole - 4 * c * i - (4 + c) * h + c * q + kernel_backward + exchange_backward)
    last = (c * h if recomputed else 0) + (4 + 2 * c) * h + norm_backward(c) * h
    moments = (
        BackwardMemory("MLP", whole + c * (h + 2 * i), of_mlp // 3),
        BackwardMemory("second norm", whole - 4 * c * i + norm_backward(c) * h, of_mlp),
        BackwardMemory("attention", attention, of_mlp + of_output),
        BackwardMemory("first norm", last, of_mlp + of_output + c * h * (q + kv)),
    )
    return LayerMemory(
        kept=kept * tokens,
        kept_on_host=on_host * tokens,
        recomputed=recomputed * tokens,
        forward=forward * tokens,
        backward=tuple(moment._replace(held=moment.held * tokens) for moment in moments),
        attention_forward=(kernel_forward + exchange_forward) * tokens,
    )


def item_bytes(dtype: str) -> int:
    """Bytes of an element, by the name of its dtype."""
    return getattr(torch, dtype).itemsize


def rank_tokens(config: TrainingConfig, plan: ParallelPlan) -> int:
    """Tokens of a micro-batch on one rank."""
    return config.train.micro_batch_size * config.data.seq_len // plan.sizes.cp


def is_flash(kernel: str) -> bool:
    """Whether attention keeps no scores, and its result as ``[B, S, heads, width]``.

    The output projection takes that as it is; the result of torch's scaled_dot_product_attention is copied first.
    """
    return kernel == VARLEN or kernel.startswith("flash")


def norm_backward(item: int) -> int:
    """Bytes an element that a root-mean-square norm's backward adds to what the norm keeps.

    At its peak the gradient of the mean of squares takes five float32 tensors, and the divided tensor is freed.
    """
    return 5 * 4 - item


def _exchange(method: str | None, kv: int, kv_grads: int, q: int, *, cp: int) -> tuple[int, int]:
    """Bytes a token that context parallelism holds in forward and in backward, beside a rank's own keys and values.

    Args:
        kv: bytes of a token's keys and values; kv_grads: of their float32 gradients; q: of its queries.
    """
    if method == "ring":  # its own block contiguous, the arriving one; the gradients that are summed, sent, received
        return 2 * kv, 2 * kv + 3 * kv_grads
    if method == "allgather":  # stacked, gathered, in the order of the sequence; all gradients, in two orders
        return kv + 2 * cp * kv, kv + 2 * cp * kv + 3 * cp * kv_grads
    if method == "ulysses":  # what goes out and what comes in
        return 2 * (q + kv), 2 * (q + kv)
    if method is not None:
        raise ValueError(f"the memory of context parallelism by {method!r} is not known here")
    return 0, 0


def layers_memory(model: PreTrainedModel, plan: ParallelPlan, *, tokens: int) -> list[LayerMemory | None]:
    """Every decoder layer's memory in order; None for a layer that is not a usual block and must be counted."""
    flash = is_flash(plan.attention.kernel)
    found: list[LayerMemory | None] = []
    trains = model.get_input_embeddings().weight.requires_grad
    for number, layer in enumerate(decoder_layers(model)):
        trains = trains or any(parameter.requires_grad for parameter in layer.parameters())
        shape = block_shape(layer) if flash else None
        checkpointed = number % plan.activation_checkpointing.every == 0
        if not trains:
            found.append(LayerMemory())  # nothing before it learns: it has no backward
        elif shape is not None:
            found.append(layer_memory(shape, plan, tokens=tokens, checkpointed=checkpointed))
        else:
            found.append(None)
    return found
