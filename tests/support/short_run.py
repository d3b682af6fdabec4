"""The TOML of a run of six steps, and what such a run comes to."""

from __future__ import annotations

import json
from pathlib import Path

from fsdp2kit.files.local import sha256
from tests.support.runs import DEMO

STEPS = 6
EVERY = 2
TOML = f"""
recipe = "sft"
[model]
weights = "random"
tokenizer = "{DEMO / "tokenizer"}"
config = {{ model_type = "llama", vocab_size = 1024, hidden_size = 64, intermediate_size = 96, num_hidden_layers = 2,
            num_attention_heads = 4, num_key_value_heads = 2, tie_word_embeddings = true }}
[fsdp]
param_dtype = "float32"
[data]
path = "{DEMO / "chat.jsonl"}"
seq_len = 64
[train]
steps = {STEPS}
global_batch_size = 4
[optimizer]
lr = 1e-3
[checkpoint]
every = {EVERY}
keep = 1
[wandb]
mode = "disabled"
"""


def outcome(run_dir: Path) -> tuple[list[tuple[float, ...]], str]:
    """Every step's numbers, and a digest of the exported weights."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    numbers = [tuple(line[key] for key in ("step", "loss", "grad_norm", "tokens_total")) for line in lines]
    [weights] = (run_dir / "hf").glob("*.safetensors")
    return numbers, sha256(weights)
