"""Tiny checkpoints of several parts (text and images), as transformers writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from fsdp2kit.weights.transfer import Reader
from tests.support.models import DEMO, DEMO_VOCABULARY, IS_5_17

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWER = {**_EYES, "image_size": 28, "patch_size": 14}
_QWEN_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "num_position_embeddings": 16,
}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_M_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
IMAGE = 128  # beyond the ids of synthetic rows: some models embed such a token as padding
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 129, "vision_start_token_id": 130, "vision_end_token_id": 131}
_GEMMA4_IDS = {"boi_token_id": 129, "eoi_token_id": 130, "video_token_id": 131, "audio_token_id": 132}
_LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**_M_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}
_HEADLESS = ("qwen3_vl", "qwen3_vl_moe")
"""transformers has the decoders of their text parts without a head."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# By transformers' model type: what its text part adds to `_TEXT`, its other part, and its own fields.
PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        _WINDOWED,
        {**_TOWER, "model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 1, "image_token_index": IMAGE, "boi_token_index": 129, "eoi_token_index": 130},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {**_WINDOWED, "global_head_dim": 32, "hidden_size_per_layer_input": 16, "pad_token_id": 0},
        {**_TOWER, "head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 16},
        {"audio_config": None, "image_token_id": IMAGE, **_GEMMA4_IDS},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": _M_ROPE},
        {**_QWEN_EYES, "depth": 2, "deepstack_visual_indexes": [0, 1]},
        {**_QWEN_IDS, "tie_word_embeddings": True},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "rope_parameters": _YARN},
        {**_TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 56},
        {"image_token_index": IMAGE, "spatial_merge_size": 2, "tie_word_embeddings": False},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        _LINEAR,
        {**_QWEN_EYES, "depth": 1},
        {**_QWEN_IDS, "tie_word_embeddings": False},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"rope_parameters": _M_ROPE, **_EXPERTS},
        {**_QWEN_EYES, "depth": 2, "deepstack_visual_indexes": [0, 1]},
        {**_QWEN_IDS, "tie_word_embeddings": False},
    ),
}


def write_whole(
    kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, vocabulary: int = DEMO_VOCABULARY, **text: Any
) -> Path:
    """Write a tiny random model of all parts, a processor's file and the demo's tokenizer; return the directory.

    Args:
        text: what differs in its text part's config.
    """
    if kind in _HEADLESS and IS_5_17:
        pytest.skip("transformers 5.17 registers no class for configs of its own")
    name, of_kind, eyes, own = PARTS[kind]
    sizes = {**_TEXT, "vocab_size": vocabulary, **of_kind, **text}
    if kind == "gemma4":
        sizes["vocab_size_per_layer_input"] = vocabulary
    config = AutoConfig.for_model(kind, text_config=sizes, vision_config=eyes, **own)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, name)._from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():  # Gemma's projection of images begins as zeros
                parameter.data += 0.2 * torch.randn_like(parameter)
    path = folder / kind
    model.to(dtype).save_pretrained(path)
    shutil.copytree(DEMO / "tokenizer", path, dirs_exist_ok=True)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Any", "size": 28}))
    return path


def load_class(kind: str, path: Path, **options: Any) -> Any:
    """The directory as the class that it was, in eval mode; nothing may be missing in it, nor too much."""
    model, info = getattr(transformers, PARTS[kind][0]).from_pretrained(path, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def stored(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory's files."""
    return {name: one for file in sorted(path.glob("*.safetensors")) for name, one in load_file(file).items()}


def read_all(forms: Iterable[str], reader: Reader) -> dict[str, Tensor]:
    """A sink: whole tensors by name."""
    return {name: reader.read(name)[...] for name in forms}


@torch.no_grad()
def look(kind: str, model: Any) -> Tensor:
    """The logits of a question with an image of one token, or two."""
    pixels, ids = torch.linspace(-1, 1, 3 * 28 * 28), torch.tensor([[5, 6, IMAGE, 8, 9, 10]])
    if kind == "gemma3":
        image = {"pixel_values": pixels.view(1, 3, 28, 28)}
    elif kind == "mistral3":
        wide = pixels.view(1, 3, 28, 28).repeat(1, 1, 1, 2)
        image = {"pixel_values": wide, "image_sizes": torch.tensor([[28, 56]])}
        ids[0, 3] = IMAGE
    elif kind == "gemma4":
        patches = pixels.view(4, 3 * 14 * 14)[None]
        image = {"pixel_values": patches, "image_position_ids": torch.tensor([[[0, 0], [1, 0], [0, 1], [1, 1]]])}
    else:
        patches = pixels[: 4 * 3 * 16].view(4, 3 * 16)
        image = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2]])}
    if kind.startswith("qwen"):
        image["mm_token_type_ids"] = (ids == IMAGE).long()
    image["pixel_values"] = image["pixel_values"].to(model.dtype)
    return model(input_ids=ids, **image).logits
