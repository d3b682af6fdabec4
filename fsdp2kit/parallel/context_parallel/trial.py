"""Our attention tried on a model's tiny twin, in one process: does it compute what the model's own does?

What a config says of a model's attention is hearsay; sinks, biases, soft caps and masks of an architecture's own show
in the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp2kit.parallel.context_parallel.attention import BlockwiseAttention, attend_with_share, use_attention
from fsdp2kit.parallel.context_parallel.masks import full_masks, layer_windows
from fsdp2kit.parallel.context_parallel.path import VARLEN, AttentionPath
from fsdp2kit.parallel.context_parallel.segments import SegmentTables, document_starts, plan_segments
from fsdp2kit.parallel.context_parallel.ulysses import share_heads

_BYPASS = "its attention does not go through transformers' attention interface"


def find_difference(twin: PreTrainedModel, path: AttentionPath, *, cp: int, pack: bool) -> str | None:
    """What would be wrong with ``path`` for the model whose twin this is, or None.

    Args:
        twin: in eval mode, with its own eager attention; it is given another.
        pack: whether rows hold several documents; else the rows tried hold one.
    """
    lengths = (11, 13, 8) if pack else (32,)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    inputs = {"input_ids": torch.arange(2, 34)[None], "position_ids": positions, "use_cache": False}
    called: list[int] = []
    try:
        with torch.no_grad():
            expected = twin(**inputs).logits
            found = _logits_on(twin, path, inputs, cp=cp, called=called)
    except Exception as error:  # whatever an architecture raises, it does not run on this attention
        first_line, *_ = [*str(error).splitlines(), ""]
        failure = f"{type(error).__name__}: {first_line}"
        return f"its attention does not run: {failure}" if called else f"{_BYPASS}, or fails before it: {failure}"
    if len(called) < twin.config.get_text_config().num_hidden_layers:
        return _BYPASS
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if not difference <= 1e-4:
        return f"its attention is not what the model's own is (logits of a small copy differ by {difference:.0e})"
    return None


def _logits_on(
    twin: PreTrainedModel, path: AttentionPath, inputs: dict[str, Any], *, cp: int, called: list[int]
) -> Tensor:
    positions, extra = inputs["position_ids"], {}
    if path.kernel == VARLEN:
        starts, windows = document_starts(positions), set(layer_windows(twin.config).values())
        tables = {w: plan_segments(starts, method=None, rank=0, cp=1, window=w) for w in windows}
        extra["segments"] = SegmentTables(tables)
    else:
        extra["attention_mask"] = full_masks(positions, config=twin.config, attention="eager", device=positions.device)
    # Kernels that need a device are believed to compute what eager does; whether heads may be shared out is not.
    attention = VARLEN if path.kernel == VARLEN else "eager"
    whole = BlockwiseAttention()

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> Any:
        called.append(1)
        if path.method != "ulysses":
            return whole(module, query, key, value, attention_mask, **options)
        shares = share_heads(query.shape[1], key.shape[1], min(cp, query.shape[1]))
        outputs = []
        for share in shares:
            q = query[:, share.query.start : share.query.stop]
            k, v = (tensor[:, share.key.start : share.key.stop] for tensor in (key, value))
            outputs.append(attend_with_share(attention, module, q, k, v, attention_mask, share=share, **options))
        return torch.cat(outputs, dim=2), None

    use_attention(twin, attend)
    return twin(**inputs, **extra).logits
