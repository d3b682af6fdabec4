"""What the loss holds: chunks of logits, what is made of them, and the gradients that it keeps for backward."""

from __future__ import annotations

import torch

from fsdp2kit.model.head_chunks import rows_at_once
from fsdp2kit.planner.sizes import StepMemory


def head_activations(step: StepMemory) -> int:
    """Bytes that the final norm keeps, and those of the hidden states that go into the head."""
    return step.tokens * step.hidden * (4 + (step.compute if step.norm_trained else 0))


def loss_saved(step: StepMemory) -> tuple[int, int]:
    """Bytes of the gradients of hidden states and of the head's weight that the loss keeps for backward."""
    if step.log_probs:
        return 0, 0
    item = 4 if chunk_of_logits(step)[0] < step.tokens else step.compute
    return step.hidden_states, step.vocabulary * step.hidden * item if step.head_trained else 0


def chunk_of_logits(step: StepMemory) -> tuple[int, int, int]:
    """Rows of a chunk of logits, the bytes of the logits, and those of their gradient where it is another tensor.

    Logits are float32, but for those of a compiled cross-entropy on CUDA.
    """
    device = torch.device(step.plan.device_type or "cuda")
    is_16_bits = device.type == "cuda" and step.compute == 2 and not step.plan.own_head
    is_compiled = is_16_bits and step.plan.compile.enabled and not step.log_probs
    rows = min(rows_at_once(device, vocabulary=step.vocabulary, narrow=is_compiled), step.tokens)
    logits = rows * step.vocabulary * (step.compute if is_compiled else 4)
    return rows, logits, rows * step.vocabulary * (step.compute if step.compute != 4 else 0)


def slope_bytes(step: StepMemory, total: int) -> tuple[int, int]:
    """Bytes of a chunk's logits, what is made of them, and the head's gradient of ``total`` bytes.

    Before and after the chunk's part of that gradient is made.
    """
    rows, logits, cast = chunk_of_logits(step)
    is_only = rows == step.tokens
    product = step.vocabulary * step.hidden * step.compute if step.head_trained else 0  # of the head's gradient
    if step.plan.own_head:
        # The sum of the chunks' gradients stays from the first chunk on.
        later = 0 if is_only else total + _own_slope_bytes(step, min(rows, step.tokens - rows), product)
        most = max(_own_slope_bytes(step, rows, product), later)
        return most, most
    made = logits if step.log_probs else cast  # softmax makes another tensor there
    # The sum of the chunks' gradients stays from the first chunk on.
    later = 0 if is_only else (logits + made) * min(rows, step.tokens - rows) // rows + total
    # On CUDA the product adds to the sum of the chunks before; elsewhere a cast one is another tensor.
    on_cuda = (step.plan.device_type or "cuda") == "cuda"
    adds = product if not is_only and step.compute != 4 and not on_cuda else 0
    return max(logits + made, later), (cast or logits) + adds + total


def _own_slope_bytes(step: StepMemory, rows: int, product: int) -> int:
    """Bytes of a chunk of ``rows`` logits of a model's own head, and of their gradients.

    Autograd keeps the logits, and what a soft cap saved. Each operation back to the matmul takes its output's gradient
    and makes its input's; the matmul makes ``product``.
    """
    own = rows * step.vocabulary * step.compute
    cast = own if step.compute != 4 else 0
    return 4 * rows * step.vocabulary + cast + 2 * own + max((1 + step.caps_logits) * own, product)
