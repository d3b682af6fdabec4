"""The embedded engine split over ranks: the trainer's bits, the whole model's texts, and what cannot be split."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import local_part
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.parallel.tensor_parallel import check_tensor_parallel
from fsdp2kit.parity.reference import load_plain
from fsdp2kit.rl.engines.build import build_engine
from fsdp2kit.rl.engines.engine import Response
from fsdp2kit.rl.weight_sync import sync_weights
from tests.rl.helpers.engines import STOPS, config_of, engine_of, requests
from tests.rl.helpers.jobs import bits, change
from tests.support.cases import Case, build
from tests.support.models import full, slow, tiny_model
from tests.support.workers import WorkerPool


def _synced_engine(
    folder: Path, case: Case, tp: int, buckets: Sequence[float]
) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
    """The engine's parameters in bfloat16 after a sync with each size of buckets, and one more of changed weights."""
    config = config_of(folder, case, tp=tp, dtype="bfloat16")
    sharded = build(config)
    engine: Any = build_engine(
        config, sharded.model, tokenizer=build_tokenizer(config.model), device=sharded.mesh.device
    )
    found = []
    for version, mib in enumerate([*buckets, buckets[0]]):
        if version == len(buckets):
            change(sharded.model)
        elif tp > 1:
            with torch.no_grad():
                for parameter in engine._model.parameters():
                    local_part(parameter).fill_(float(version))
        engine.version = engine.version if version == len(buckets) else None
        sync_weights(sharded.model, engine, version=version, dtype=engine.dtype, bucket_mib=mib)
        state = engine._model.state_dict()
        found.append({name: bits(_whole(one).clone()) for name, one in state.items()})
    with torch.no_grad():
        cache = engine._model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values
    parameters = list(engine._model.parameters())
    split = sum(local_part(one).nbytes for one in parameters) / sum(one.nbytes for one in parameters)
    return found, {"heads": cache.layers[0].keys.shape[1], "share": split}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter of which each rank of the engine has a part: of two that are fused, a part of each."""
    if not isinstance(tensor, DTensor):
        return tensor
    [placement] = tensor.placements
    fused = getattr(placement, "split_factor", 1)
    if fused == 1:
        return tensor.full_tensor()
    local = tensor.to_local().contiguous()
    parts = [torch.empty_like(local) for _ in range(tensor.device_mesh.size())]
    dist.all_gather(parts, local, group=tensor.device_mesh.get_group())
    pieces = zip(*(part.chunk(fused, placement.dim) for part in parts), strict=True)
    return torch.cat([piece for of_one in pieces for piece in of_one], placement.dim)


HYBRID = (("strategy", "hybrid_shard"),)
SPLIT = [
    (Case("smollm2_even", 1, 2), 2),
    (Case("llama3_even", 2, 1), 2),
    full(Case("llama3_even", 2, 1), 1),
    full(Case("smollm2_even", 2, 2), 2),
    slow(Case("smollm2_even", 1, 2), 1),
    slow(Case("llama3_even", 2, 2), 1),
    full(Case("qwen3_moe_even", 4, 1, fsdp=HYBRID, dp_replicate=2), 2),
]


@pytest.mark.parametrize(("case", "tp"), SPLIT, ids=str)
def test_a_split_engine_has_the_trainers_bits(case: Case, tp: int, pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model(case.kind).save_pretrained(tmp_path / case.kind)
    plain = load_plain(tmp_path / case.kind)
    first = {name: bits(tensor) for name, tensor in copy.deepcopy(plain).bfloat16().state_dict().items()}
    change(plain)
    second = {name: bits(tensor) for name, tensor in plain.bfloat16().state_dict().items()}
    for syncs, sizes in pool.run(case.world, _synced_engine, tmp_path, case, tp, (2**-5, 1, 64)):
        for found, want in zip(syncs, [first, first, first, second], strict=True):
            assert found.keys() == want.keys()
            assert not [name for name in want if not np.array_equal(found[name], want[name])]
        assert sizes["heads"] == 2 // tp
        assert sizes["share"] < 1 / tp + 0.1  # norms and routers are whole; in some transformers the embedding is


def _answers(folder: Path, case: Case) -> list[Response]:
    """What this rank was asked, which is more on some ranks of a sub-group than on others."""
    config = config_of(folder, case, tp=2, batch_size=3)
    sharded = build(config)
    engine: Any = build_engine(
        config, sharded.model, tokenizer=build_tokenizer(config.model), device=sharded.mesh.device
    )
    engine._stops = STOPS
    sync_weights(sharded.model, engine, version=0, dtype=engine.dtype)
    return engine.generate(requests(*range(2, 9))[dist.get_rank() :: 4], max_new_tokens=12, temperature=0.9)


@pytest.mark.full
def test_ranks_of_a_split_engine_answer_what_each_was_asked(pool: WorkerPool, tmp_path: Path) -> None:
    case = Case("llama3_even", 4, 1)
    tiny_model(case.kind).save_pretrained(tmp_path / case.kind)
    ranks = pool.run(4, _answers, tmp_path, case)
    assert list(map(len, ranks)) == [2, 2, 2, 1]
    found = [ranks[at % 4][at // 4] for at in range(7)]
    expected = engine_of(tiny_model(case.kind)).generate(requests(*range(2, 9)), max_new_tokens=12, temperature=0.9)
    assert {response.is_whole for response in expected} == {True, False}
    for mine, whole in zip(found, expected, strict=True):
        assert (mine.ids, mine.is_whole) == (whole.ids, whole.is_whole)
        np.testing.assert_allclose(mine.log_probs, whole.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "tp", "message"),
    [
        (
            "smollm2",
            2,
            "rollout.tp: 2 does not divide the model's num_key_value_heads 3; use a divisor of it",
        ),
        ("llama3_even", 4, "rollout.tp: 4 does not divide the model's num_key_value_heads 2"),
        (
            "gpt2",
            2,
            "rollout.tp: 2, but transformers .* has no tensor-parallel plan for GPT2LMHeadModel; leave it out",
        ),
    ],
)
def test_models_that_cannot_be_split_are_refused(kind: str, tp: int, message: str) -> None:
    if kind == "gpt2":
        config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=64)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = tiny_model(kind)
    check_tensor_parallel(model, 1)
    with pytest.raises(UserError, match=message):
        check_tensor_parallel(model, tp)
