"""Cross-field checks: the mesh for every strategy, accumulation, and what does not go together."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.checks import (
    MeshSizes,
    check_config,
    resolve_accumulation,
    resolve_mesh,
    smallest_world,
)
from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.config.schema import CosineScheduleConfig, FSDPConfig, MeshConfig
from fsdp2kit.errors import UserError
from fsdp2kit.planner.search import changed

FULL, ZERO2, NONE, HYBRID, HYBRID2 = "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"


def resolve(strategy: Any, mesh: dict[str, Any], *, world: int, local: int | None = None) -> MeshSizes:
    section = FSDPConfig(strategy=strategy)
    return resolve_mesh(MeshConfig(**mesh), section, world_size=world, local_world_size=local or world)


@pytest.mark.parametrize(
    ("strategy", "mesh", "world", "local", "expected"),
    [
        (FULL, {}, 1, 1, (1, 1, 1)),
        (FULL, {}, 8, 8, (1, 8, 1)),
        (FULL, {"cp": 2}, 8, 8, (1, 4, 2)),
        (FULL, {"dp_replicate": 1, "dp_shard": 4, "cp": 2}, 8, 8, (1, 4, 2)),
        (ZERO2, {}, 16, 8, (1, 16, 1)),
        (NONE, {}, 8, 8, (8, 1, 1)),
        (NONE, {"dp_shard": 1, "cp": 4}, 8, 8, (2, 1, 4)),
        (HYBRID, {}, 16, 8, (2, 8, 1)),  # dp_shard × cp = LOCAL_WORLD_SIZE
        (HYBRID, {"cp": 8}, 16, 8, (2, 1, 8)),
        (HYBRID, {}, 8, 8, (1, 8, 1)),  # one node: nothing to replicate
        (HYBRID, {"dp_replicate": 4}, 16, 8, (4, 4, 1)),
        (HYBRID, {"dp_shard": 2}, 16, 8, (8, 2, 1)),
        (HYBRID, {"dp_shard": 2, "cp": 16}, 32, 8, (1, 2, 16)),  # cp over nodes, when dp_shard is said
        (HYBRID2, {"dp_replicate": 2, "cp": 4}, 16, 8, (2, 2, 4)),
    ],
)
def test_auto_sizes(strategy: str, mesh: dict, world: int, local: int, expected: tuple[int, int, int]) -> None:
    sizes = resolve(strategy, mesh, world=world, local=local)
    assert (sizes.dp_replicate, sizes.dp_shard, sizes.cp) == expected
    assert sizes.world_size == world
    assert sizes.dp == expected[0] * expected[1]


@pytest.mark.parametrize(
    ("strategy", "mesh", "world", "local", "message"),
    [
        (FULL, {"cp": 3}, 8, 8, "mesh.cp: 3 does not divide the world size 8; use one of 1, 2, 4, 8,"),
        (FULL, {"dp_shard": 3}, 8, 8, "dp_replicate 1 × dp_shard 3 × cp 1 = 3, but the world size is 8"),
        (FULL, {"dp_replicate": 2}, 8, 8, "mesh.dp_replicate: 2 with fsdp.strategy = 'full_shard'; choose"),
        (NONE, {"dp_shard": 2}, 8, 8, "mesh.dp_shard: 2 with fsdp.strategy = 'no_shard', which shards nothing"),
        (NONE, {"dp_replicate": 4}, 8, 8, "= 4, but the world size is 8"),
        (HYBRID, {"cp": 16}, 32, 8, "mesh.cp: 16 does not divide the 8 ranks of a node; set mesh.dp_shard"),
        (HYBRID, {"dp_shard": 5}, 16, 8, "but the world size is 16"),
        (HYBRID, {}, 12, 8, "but the world size is 12"),  # nodes of different sizes
    ],
)
def test_sizes_that_do_not_fit(strategy: str, mesh: dict, world: int, local: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(strategy, mesh, world=world, local=local)
    assert message in str(caught.value)


def test_whatever_resolves_multiplies_to_the_world() -> None:
    sizes = ["auto", 1, 2, 3, 4]
    for strategy, replicate, shard, cp, world in itertools.product(
        (FULL, ZERO2, NONE, HYBRID, HYBRID2), sizes, sizes, (1, 2, 3), (1, 2, 4, 6, 12)
    ):
        mesh = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp}
        try:
            found = resolve(strategy, mesh, world=world, local=min(world, 4))
        except UserError:
            continue
        assert found.dp_replicate * found.dp_shard * found.cp == world
        asked = (replicate, shard, cp)
        got = (found.dp_replicate, found.dp_shard, found.cp)
        assert all(want in ("auto", have) for want, have in zip(asked, got, strict=True))


@pytest.mark.parametrize(("batch", "micro", "dp", "expected"), [(8, 1, 1, 8), (8, 2, 4, 1), (64, 2, 4, 8)])
def test_accumulation(batch: int, micro: int, dp: int, expected: int) -> None:
    assert resolve_accumulation(batch, micro, dp=dp) == expected


@pytest.mark.parametrize(
    ("batch", "micro", "dp", "advice"), [(10, 2, 2, "use 8 or 12,"), (3, 1, 8, "use 8,"), (9, 1, 8, "use 8 or 16,")]
)
def test_accumulation_that_does_not_divide_says_what_would(batch: int, micro: int, dp: int, advice: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_accumulation(batch, micro, dp=dp)
    assert caught.value.where == "train.global_batch_size"
    assert caught.value.what == f"{batch} is not a multiple of dp {dp} × micro_batch_size {micro}"
    assert caught.value.todo.startswith(advice)


def config_with(**sections: dict[str, Any]) -> TrainingConfig:
    values: dict[str, Any] = {"recipe": "sft", "model": {"path": "gpt2"}, "train": {"steps": 1}}
    return TrainingConfig.model_validate({**values, **sections})


def remedies(config: TrainingConfig, *, ranks: int) -> list[tuple[str, list[int]]]:
    """Refusals that name numbers, the key and the numbers of each, until the first number of each is accepted."""
    found: list[tuple[str, list[int]]] = []
    while (error := refusal(config, ranks=ranks)) is not None:
        numbers = re.match(r"use (\d+)(?: or (\d+))?\b", error.todo)
        assert numbers, error
        found.append((error.where, [int(number) for number in numbers.groups() if number]))
        assert len(found) < 5, found
        config = changed(config, {error.where: found[-1][1][0]})
    return found


def refusal(config: TrainingConfig, *, ranks: int) -> UserError | None:
    try:
        check_config(config, world_size=ranks, local_world_size=min(ranks, 8))
    except UserError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("n", "micro", "size", "expected"),
    [
        (8, 1, 12, [8, 16]),
        (8, 2, 4, [8]),
        (8, 1, 8, None),
        (3, 2, 25, [24, 48]),
        (5, 1, 22, [20, 40]),
        (5, 1, 16, [20]),
        (16, 1, 8, [16]),
    ],
)
def test_a_batch_of_rewards_that_is_advised_is_accepted(n: int, micro: int, size: int, expected: Any) -> None:
    """Whole groups, and whole micro-batches on each of four ranks, at once."""
    reward = {"reward": [{"function": "a:b"}], "data": {"path": "x"}, "rollout": {"n": n}}
    train = {"steps": 1, "global_batch_size": size, "micro_batch_size": micro}
    config = RLConfig.model_validate({"recipe": "grpo", "model": {"path": "gpt2"}, "train": train, **reward})
    found = remedies(config, ranks=4)
    assert found == ([] if expected is None else [("train.global_batch_size", expected)])
    for number in expected or []:
        assert remedies(changed(config, {"train.global_batch_size": number}), ranks=4) == []


@pytest.mark.parametrize(("length", "cp", "expected"), [(101, 4, [100, 104]), (3, 4, [4]), (8, 4, None)])
def test_a_length_that_is_advised_is_accepted(length: int, cp: int, expected: Any) -> None:
    config = config_with(data={"seq_len": length}, mesh={"cp": cp})
    assert remedies(config, ranks=4) == ([] if expected is None else [("data.seq_len", expected)])


def test_a_length_that_is_advised_leaves_room_for_a_prompt() -> None:
    reward = {"reward": [{"function": "a:b"}], "data": {"path": "x", "seq_len": 9}, "rollout": {"max_new_tokens": 8}}
    values = {"model": {"path": "gpt2"}, "mesh": {"cp": 4}, "train": {"steps": 1, "global_batch_size": 8}, **reward}
    config = RLConfig.model_validate({"recipe": "grpo", **values})
    assert remedies(config, ranks=4) == [("data.seq_len", [12])]


def test_a_good_config_passes_and_returns_its_mesh() -> None:
    config = config_with(mesh={"cp": 2}, eval={"every": 5, "split": "test"})
    assert check_config(config, world_size=4, local_world_size=4) == MeshSizes(1, 2, 2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"steps": 1, "global_batch_size": 3}}, "train.global_batch_size: 3 is not a multiple"),
        ({"train": {}}, "train: neither steps nor epochs is given; give exactly one"),
        ({"train": {"steps": 1, "epochs": 1}}, "train: both steps and epochs are given; give exactly one"),
        ({"eval": {"every": 1}}, "eval: evaluation would run on the training data itself"),
        ({"train": {"steps": 0}}, "eval: evaluation would run on the training data itself"),
        ({"model": {}}, "model: neither model.path nor model.config.model_type is given"),
        ({"model": {"config": {"model_type": "llama"}}}, "model.weights: 'pretrained' without a model.path"),
        (
            {"fsdp": {"reshard_after_forward": 3}},
            "fsdp.reshard_after_forward: 3 does not divide the shard size 4; use true, false",
        ),
        (
            {"fsdp": {"min_params": 1000}},
            "fsdp.min_params: 1000 with fsdp.unit = 'layer', whose units do not go by size; leave it out",
        ),
        (
            {"train": {"steps": 50}, "lr_schedule": {"warmup_steps": 50}},
            "lr_schedule.warmup_steps: 50, but the whole run has 50 steps",
        ),
        (
            {"lr_schedule": {"warmup_steps": 5, "warmup_ratio": 0.1}},
            "lr_schedule.warmup_steps: 5 beside lr_schedule.warmup_ratio = 0.1; leave one of them out",
        ),
        (
            {"train": {"steps": 9}, "lr_schedule": {"name": "wsd", "warmup_steps": 5, "decay_steps": 5}},
            "lr_schedule.decay_steps: 5 after 5 steps of warm-up, but the whole run has 9 steps",
        ),
        (
            {"activation_checkpointing": {"every": 2}},
            "activation_checkpointing.every: 2 with mode = 'none', which checkpoints no layer; leave it out",
        ),
        (
            {"model": {"path": "gpt2", "weights": "/no/Random"}},
            "model.weights: /no/Random: no such directory; write",
        ),
        (
            {"train": {"steps": 9}, "lr_schedule": {"name": "wsd", "warmup_ratio": 0.5, "decay_steps": 5}},
            "lr_schedule.decay_steps: 5 after 5 steps of warm-up, but the whole run has 9 steps",
        ),
        ({"run": {"dir": __file__}}, f"run.dir: {__file__} is a file; name a directory"),
        ({"run": {"dir": "s3://bucket/run"}}, "run.dir: s3://bucket/run is a URL, and a run directory lies on a disk"),
        ({"run": {"resume": "/no/last"}}, "run.resume: /no/last: no such directory; give the path of a checkpoint"),
        ({"train": {"steps": 9, "max_nonfinite": 3}}, "train.max_nonfinite: 3 with train.on_nonfinite = 'stop'"),
        (
            {"checkpoint": {"export": "best"}},
            "checkpoint.export: 'best', but no best checkpoint is kept; set eval.keep",
        ),
    ],
)
def test_what_does_not_go_together(sections: dict[str, dict], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_config(config_with(**sections), world_size=4, local_world_size=4)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"fsdp": {"reshard_after_forward": True}},  # a bool is not the integer 1
        {"fsdp": {"reshard_after_forward": 2}},
        {"train": {"epochs": 2}},
        {"train": {"steps": 0}, "eval": {"path": "held-out.jsonl"}},
        {"model": {"config": {"model_type": "llama"}, "weights": "random"}},
        {"lr_schedule": {"name": "wsd", "min_lr_ratio": 0.1}},
        {"lr_schedule": {"warmup_ratio": 0.5}},
        {"optimizer": {"name": "adamw_bf16"}, "fsdp": {"offload": "optimizer"}},
        {"optimizer": {"name": "adamw_bf16"}, "fsdp": {"offload": "params"}},
        {"train": {"steps": 0}, "eval": {"path": "held-out.jsonl"}, "lr_schedule": {"warmup_steps": 50}},
        {"train": {"epochs": 1}, "lr_schedule": {"warmup_steps": 50}},  # only the data tell
        {"train": {"steps": 9}, "lr_schedule": {"name": "wsd", "warmup_steps": 5, "decay_steps": 4}},
    ],
)
def test_what_goes_together(sections: dict[str, dict]) -> None:
    check_config(config_with(**sections), world_size=4, local_world_size=4)


@pytest.mark.parametrize(
    ("ratio", "total", "steps"), [(0.03, 100, 3), (0.03, 40, 2), (0.5, 1, 0), (0.99, 3, 2), (0.1, 0, 0)]
)
def test_a_ratio_of_the_run_always_fits(ratio: float, total: int, steps: int) -> None:
    assert CosineScheduleConfig(warmup_ratio=ratio).warmup(total) == steps


@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE, HYBRID, HYBRID2])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_smallest_world_is_the_first_that_is_accepted(strategy: str, tp: int) -> None:
    """Where none is, the reason is told there: not that the mesh's sizes do not multiply to that world."""
    fixed = {"recipe": "grpo", "model": {"path": "gpt2"}, "reward": [{"function": "a:b"}], "data": {"path": "x"}}
    fixed |= {"rollout": {"tp": tp, "n": 2}, "train": {"steps": 1, "global_batch_size": 64}}

    for replicate, shard, cp, ep in itertools.product(
        ("auto", 1, 2), ("auto", 1, 2), (1, 2), (1, 4)[: 3 - min(tp, 2)]
    ):
        mesh = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "ep": ep}
        config = RLConfig.model_validate({**fixed, "mesh": mesh, "fsdp": {"strategy": strategy}})
        accepted = [world for world in range(1, 33) if refusal(config, ranks=world) is None]
        if accepted:
            assert smallest_world(config) == accepted[0], mesh
        else:
            said = refusal(config, ranks=smallest_world(config))
            assert said
            assert said.where in ("mesh.dp_shard", "mesh.dp_replicate", "mesh.ep", "rollout.tp"), said
