"""The advice follows from the figures, in the words of the TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.overlap.report import Settings, advise, read_settings
from fsdp2kit.overlap.split import Split


def mean(exposed: dict[tuple[str, str], float], **changes: Any) -> Split:
    """A mean step of length 100 with the given exposed time of each collective and phase."""
    total = sum(exposed.values())
    values: dict[str, Any] = {
        "duration": 100.0,
        "compute_only": 95.0 - total,
        "overlapped": 0.0,
        "exposed": total,
        "idle": 5.0,
        "waiting": None,
        "collectives": exposed,
        "units": {},
    }
    return Split(**(values | changes))


def settings(micro_batch_size: int = 1, micro_batches: int = 1, **fsdp: Any) -> Settings:
    return Settings(FSDPConfig(**fsdp), micro_batch_size, micro_batches)


FORWARD, BACKWARD = ("all_gather", "forward"), ("all_gather", "backward")
REDUCE, REPLICATE = ("reduce_scatter", "backward"), ("all_reduce", "backward")
DEEPER = {"fsdp.backward_prefetch": "2"}
KEEP = {"fsdp.reshard_after_forward": "false"}
LARGER = {"train.micro_batch_size": "2"}
NOTHING = {"": ""}


@pytest.mark.parametrize(
    ("found", "run", "expected"),
    [
        (mean({BACKWARD: 3}), settings(), DEEPER | KEEP),
        (mean({BACKWARD: 3}), settings(strategy="shard_grad_op"), DEEPER),
        (mean({BACKWARD: 3}), settings(strategy="shard_grad_op", reshard_after_forward=4), DEEPER | KEEP),
        (mean({BACKWARD: 3}), settings(reshard_after_forward=False), DEEPER),
        (mean({FORWARD: 3}), settings(), {"fsdp.forward_prefetch": "1"}),
        (mean({FORWARD: 3}), settings(forward_prefetch=2), {"fsdp.forward_prefetch": "3"}),
        (mean({FORWARD: 2.9, BACKWARD: 2.9}), settings(micro_batches=2), NOTHING),
        (
            mean({REDUCE: 4, REPLICATE: 4}),
            settings(micro_batch_size=3, micro_batches=2),
            {"fsdp.reduce_every_micro_batch": "false", "train.micro_batch_size": "6"},
        ),
        (mean({REDUCE: 4}), settings(), NOTHING),  # one micro-batch: they are once a step
        (mean({REDUCE: 4}), settings(micro_batches=2, reduce_every_micro_batch=False), NOTHING),
        (mean({REDUCE: 6}), settings(), LARGER),
        (mean({("broadcast", "other"): 48}), settings(), LARGER),  # more than compute
        (mean({}, idle=25.0, compute_only=75.0), settings(), {"compile.enabled": "true"}),
        (mean({}, idle=25.0, compute_only=75.0), settings(offload="params"), NOTHING),  # copies are idle, too
    ],
)
def test_cuda(found: Split, run: Settings, expected: dict[str, str]) -> None:
    assert {one.key: one.value for one in advise(found, run, device="cuda", waiting_by_rank={})} == expected


@pytest.mark.parametrize(("micro_batches", "grows"), [(1, True), (2, False), (3, True), (4, False)])
def test_a_global_batch_that_is_no_multiple_any_more_is_told(micro_batches: int, grows: bool) -> None:
    run = settings(micro_batches=micro_batches, reduce_every_micro_batch=False)
    [larger] = advise(mean({REDUCE: 6}), run, device="cuda", waiting_by_rank={})
    assert ("train.global_batch_size has to grow" in str(larger)) == grows


def test_on_gloo_prefetch_is_no_advice() -> None:
    found = advise(mean({FORWARD: 10, BACKWARD: 10}), Settings(), device="cpu", waiting_by_rank={})
    assert {one.key for one in found} == {"", "fsdp.reshard_after_forward", "train.micro_batch_size"}
    assert "gloo" in str(found[0])


@pytest.mark.parametrize(
    ("by_rank", "told"),
    [
        ({0: 12.0, 1: 11.0, 2: 13.0}, "slow by turns"),
        ({0: 18.0, 1: 18.0, 2: 0.5}, "it is rank 2"),
        ({0: 18.0, 1: None}, "by turns"),
    ],
)
def test_waiting(by_rank: dict[int, float | None], told: str) -> None:
    found = advise(mean({}, waiting=12.0), Settings(), device="cuda", waiting_by_rank=by_rank)
    assert told in str(found[0])
    assert str(found[0]).startswith("12 % of the step")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", settings()),
        (
            '[fsdp]\nbackward_prefetch = 3\nstrategy = "no_shard"\n[train]\nmicro_batch_size = 4',
            settings(4, backward_prefetch=3, strategy="no_shard"),
        ),
        ("[train]\nglobal_batch_size = 12\nmicro_batch_size = 3\n[mesh]\ncp = 2", settings(3, 4)),
        ('[fsdp]\nbackward_prefetch = "auto"', settings()),  # another version's
        ('[train]\nmicro_batch_size = "auto"', settings()),
        ("train = 1", settings()),
        ("not TOML", settings()),
    ],
)
def test_settings_are_the_runs(text: str, expected: Settings, tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "config.toml").write_text(text)
    file = tmp_path / "trace" / "rank-00000.json.gz"
    file.touch()
    for path in (tmp_path, tmp_path / "trace", file):
        assert read_settings(path, world_size=2) == expected
