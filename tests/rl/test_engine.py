"""The embedded engine against plain transformers, and against the trainer that its weights come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.rl.engines.build import build_engine
from fsdp2kit.rl.engines.engine import Request
from fsdp2kit.rl.engines.transformers_engine import TransformersEngine
from fsdp2kit.rl.packing import pack
from fsdp2kit.rl.weight_sync import sync_weights
from tests.rl.helpers.engines import STOPS, config_of, engine_of, requests
from tests.rl.helpers.made_up import make_rollouts, plain_log_probs
from tests.support.cases import Case, build
from tests.support.models import IS_5_17, full, tiny_model
from tests.support.workers import WorkerPool

HYBRID = ["qwen3_moe", "lfm2", "qwen3_next", "nemotron_h", "gpt_oss", "gemma3n"]
if not IS_5_17:  # which makes Falcon-H1's mask for another length
    HYBRID.append("falcon_h1")


@pytest.mark.parametrize("kind", ["smollm2", "gemma3", "granitemoehybrid", *map(full, HYBRID)])
def test_log_probs_of_padded_batches_are_those_of_single_rows(kind: str) -> None:
    model: Any = tiny_model(kind)
    engine = engine_of(model, batch_size=4)
    asked = requests(3, 20, 1, 7, 12, 5)
    calls, generate = [], model.generate
    model.generate = lambda ids, **options: calls.append(len(ids)) or generate(ids, **options)
    found = engine.generate(asked, max_new_tokens=16, temperature=0.7)
    assert calls[:2] in ([4, 3], [4, 2], [4, 1]), "rows that have ended leave their batch"
    assert {response.is_whole for response in found} == {True, False}
    for request, response in zip(asked, found, strict=True):
        assert (response.ids[-1] in STOPS) == response.is_whole
        assert not set(response.ids[:-1]) & set(STOPS)
        assert response.is_whole or len(response.ids) == 16
        expected, _ = plain_log_probs(model, list(request.ids), response.ids)
        torch.testing.assert_close(torch.tensor(response.log_probs), expected.detach(), rtol=0, atol=1e-5)


def test_rows_leave_where_their_room_ends() -> None:
    asked = [replace(one, room=room) for one, room in zip(requests(3, 20, 1, 7), (2, 9, 1, None), strict=True)]
    engine = engine_of(tiny_model("smollm2"))
    engine._stops = ()
    found = engine.generate(asked, max_new_tokens=16, temperature=1.0)
    assert [len(one.ids) for one in found] == [2, 9, 1, 16]
    whole = engine.generate(requests(3, 20, 1, 7), max_new_tokens=16, temperature=1.0)
    assert [one.ids for one in found] == [one.ids[: len(mine.ids)] for one, mine in zip(whole, found, strict=True)]


def test_no_row_leaves_a_cache_that_only_the_model_knows() -> None:
    config = AutoConfig.for_model("falcon_mamba", vocab_size=128, hidden_size=32, num_hidden_layers=1, state_size=4)
    torch.manual_seed(0)
    engine = engine_of(AutoModelForCausalLM.from_config(config))
    alone = [engine.generate([one], max_new_tokens=8, temperature=1.0)[0].ids for one in requests(3, 20, 1, 7)]
    del engine.share
    for _ in range(2):
        found = engine.generate(requests(3, 20, 1, 7), max_new_tokens=8, temperature=1.0)
        assert [one.ids for one in found] == alone
        assert engine.share == 1


def test_without_tokens_that_end_a_response_those_of_the_model_end_none() -> None:
    model: Any = tiny_model("smollm2")
    engine = engine_of(model)
    engine._stops = ()
    asked = requests(3, 9)
    first = engine.generate(asked, max_new_tokens=16, temperature=1.0)
    # `generate` would fill up this row from there on, beside one that goes on.
    model.generation_config.eos_token_id = first[0].ids[3]
    assert engine.generate(asked, max_new_tokens=16, temperature=1.0) == first


def test_a_seed_decides_whatever_the_batch() -> None:
    model = tiny_model("smollm2")
    asked = requests(3, 20, 1, 7)
    whole = engine_of(model).generate(asked, max_new_tokens=16, temperature=1.0)
    alone = [engine_of(model).generate([one], max_new_tokens=16, temperature=1.0)[0] for one in asked]
    assert [one.ids for one in whole] == [one.ids for one in alone]
    other = engine_of(model).generate(requests(3, 20, 1, 7, seed=1), max_new_tokens=16, temperature=1.0)
    assert [one.ids for one in whole] != [one.ids for one in other]


def test_tokens_are_drawn_from_the_models_distribution() -> None:
    model: Any = tiny_model("smollm2")
    prompt = requests(5)[0].ids
    found = engine_of(model, batch_size=4000).generate(
        [Request(prompt, (at,)) for at in range(4000)], max_new_tokens=1, temperature=0.25
    )
    with torch.no_grad():
        exact = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / 0.25, dim=-1)
    counts = torch.bincount(torch.tensor([one.ids[0] for one in found]), minlength=128).double()
    common = exact > 5 / 4000
    assert common.sum() > 5
    chi = ((counts - 4000 * exact) ** 2 / (4000 * exact))[common].sum()
    assert chi < 2 * common.sum(), "about its degrees of freedom"


def _trainer_and_engine(folder: Path, case: Case, tp: int) -> float:
    """The largest difference between the log-probabilities of a rollout and the trainer's, after weights changed."""
    config = config_of(folder, case, tp=tp)
    sharded = build(config)
    model, mesh = sharded.model, sharded.mesh
    engine = build_engine(config, model, tokenizer=build_tokenizer(config.model), device=mesh.device)
    with pytest.raises(RunFailure, match="no weights"):
        engine.require(0)
    largest = 0.0
    for version in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        sync_weights(model, engine, version=version, dtype=engine.dtype, bucket_mib=1)
        engine.require(version)
        prompts, _ = make_rollouts(tiny_model(case.kind))
        asked = [Request(prompt, (version, at)) for at, prompt in enumerate(prompts)]
        found = engine.generate(asked, max_new_tokens=20, temperature=0.8)
        texts = [(prompt, one.ids, one.sampled) for prompt, one in zip(prompts, found, strict=True)]
        values = {"engine": [torch.tensor(response.log_probs).numpy() for response in found]}
        sizes = {"dp": mesh.sizes.dp, "dp_rank": mesh.dp_rank, "cp": mesh.sizes.cp}
        for batch in pack(texts, values, seq_len=64, micro_batch_size=1, pad_id=0, **sizes):
            inputs = sharded.inputs(batch)
            expected = inputs.pop("engine")
            log_probs, _ = model.token_log_probs(**inputs, temperature=0.8)
            (log_probs.sum() * 0).backward()
            if len(expected):
                largest = max(largest, (log_probs - expected).abs().max().item())
        model.zero_grad()
        engine.sleep()
        with pytest.raises(RunFailure, match="asleep on the host"):
            engine.generate(asked, max_new_tokens=1, temperature=0.8)
        engine.wake("weights")
        engine.wake("cache")
    return largest


AGREE = [full(Case("smollm2", 2, 1), 1), (Case("gemma3", 1, 2), 1)]
SPLIT = [full(Case("llama3_even", 2, 2), 2), full(Case("qwen3_moe_even", 1, 2), 2)]
THOROUGH = [
    pytest.param(Case(kind, dp, cp), tp, marks=pytest.mark.slow)
    for kind, dp, cp, tp in (
        ("llama3", 1, 2, 1),
        ("qwen3_moe", 2, 1, 1),
        ("smollm2_even", 1, 2, 2),
        ("gemma3_even", 2, 1, 2),
    )
]


@pytest.mark.parametrize(("case", "tp"), [*AGREE, *SPLIT, *THOROUGH], ids=str)
def test_trainer_and_engine_agree(case: Case, tp: int, pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model(case.kind).save_pretrained(tmp_path / case.kind)
    assert max(pool.run(case.world, _trainer_and_engine, tmp_path, case, tp)) < 1e-5


def test_weights_that_did_not_all_come_are_not_served() -> None:
    engine = TransformersEngine(
        RLConfig.model_validate({"recipe": "x", "reward": [{"function": "a:b"}]}).rollout,
        tiny_model("smollm2").eval(),
        stops=(),
        pad_id=None,
    )
    engine.begin_update(3)
    with pytest.raises(RunFailure, match=r"did not get model\.embed_tokens\.weight"):
        engine.finish_update(3)
    with pytest.raises(RunFailure, match="broke off"):
        engine.require(3)
