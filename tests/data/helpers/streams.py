"""Streams of rows, and what is read of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fsdp2kit.config.schema import ChatDataConfig, TrainConfig, TrainingConfig
from fsdp2kit.data.build import Data, build_data
from tests.data.helpers.templates import make_tokenizer

SEQ_LEN, GLOBAL = 16, 4
TOKENIZER = make_tokenizer(None, eos="<|end|>")


def stream(paths: list[Path] | Path, *, dp: int = 1, rank: int = 0, micro: int = 1, steps: int = 1, **options) -> Data:
    section: dict = {"format": "tokens", "seq_len": SEQ_LEN, "streaming": True, "overlong": "split", **options}
    if isinstance(paths, list):
        weights = section.pop("weights", [1.0] * len(paths))
        names = [{"path": str(path), "weight": weight} for path, weight in zip(paths, weights, strict=True)]
        section["sources"] = names
    else:
        section["path"] = str(paths)
    config = TrainingConfig.model_construct(
        recipe="x",
        data=ChatDataConfig.model_validate(section),
        train=TrainConfig(steps=steps, global_batch_size=GLOBAL, micro_batch_size=micro),
    )
    mesh = SimpleNamespace(dp_rank=rank, sizes=SimpleNamespace(dp=dp))
    return build_data(config, tokenizer=TOKENIZER, mesh=mesh, vocab_size=10**6)


def rows_of(lengths: list[int]) -> list[dict]:
    """Row i holds 100 i + 1, 100 i + 2, …, so every token says where it belongs."""
    return [{"input_ids": [100 * (row + 1) + at for at in range(length)]} for row, length in enumerate(lengths)]
