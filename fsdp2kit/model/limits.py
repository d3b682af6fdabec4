"""What a model cannot do: sequences beyond its positions, training with an attention that has no backward."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.model.twin import build_twin


def check_positions(model: PreTrainedModel, *, seq_len: int) -> None:
    """Refuse rows longer than a model's table of positions, learned or computed beforehand.

    Tried on a tiny twin, since a config does not say whether its ``max_position_embeddings`` is a table's size or
    only what the model was trained on.

    Raises:
        UserError: ``seq_len`` is beyond the table.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or seq_len <= limit:
        return
    twin = build_twin(model)
    size = twin and getattr(twin.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(size, int) and _runs(twin, size) and not _runs(twin, size + 1):
        raise UserError(
            "data.seq_len",
            f"{seq_len} is beyond the {limit} positions of {type(model).__name__}, which has a table of them",
            f"use at most {limit}",
        )


def check_rope(config: PretrainedConfig, *, seq_len: int) -> None:
    """Refuse RoPE whose frequencies follow the longest sequence at hand, for rows long enough that they would.

    "dynamic" and "longrope" look at the largest position of a forward pass: that of a micro-batch's longest document,
    or of a rank's part of it. The same token would be rotated differently on another mesh, and "dynamic" remembers.

    Raises:
        UserError: ``seq_len`` is beyond the length from which on they do.
    """
    config = config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given, *(kind for kind in given.values() if isinstance(kind, dict))]
    for kind in kinds:
        name = kind.get("rope_type")
        if name not in ("dynamic", "longrope"):
            continue
        original = (name == "longrope" and kind.get("original_max_position_embeddings")) or (
            getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        )
        if seq_len > original:
            raise UserError(
                "data.seq_len",
                f"{seq_len} is beyond {original}, from where on {name!r} RoPE changes with the longest sequence a "
                "rank sees, so results would depend on the mesh and the micro-batch",
                f"use at most {original}, or another rope_type (such as yarn) in model.config.rope_parameters",
            )


def check_attention(attention: str, *, device: torch.device) -> None:
    """Refuse an attention that cannot train on this device.

    Raises:
        UserError: FlexAttention on a CPU, where torch has no backward for it.
    """
    if device.type == "cpu" and attention == "flex_attention":
        raise UserError(
            "model.attention", "'flex_attention' has no backward on a CPU", "use 'sdpa' or 'eager', or a CUDA device"
        )


def _runs(twin: Any, length: int) -> bool:
    positions = torch.arange(length)[None]
    try:
        with torch.no_grad():
            twin(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    except (IndexError, RuntimeError):  # past the end of an embedding, or of a buffer
        return False
    return True
