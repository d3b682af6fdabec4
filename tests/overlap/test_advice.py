"""The advice follows from the figures, in the words of the TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.overlap.report import Settings, advise, read_settings
from fsdp2kit.overlap.split import Figures, Split


def mean(exposed: dict[tuple[str, str], float], *, hidden: float = 0.0, **changes: Any) -> Split:
    """A step of 100, of which collectives expose as much as given; `hidden` more of each."""
    total = sum(exposed.values())
    rows = {
        key: Figures(count=1, compute=0, communication=time + hidden, exposed=time, waiting=None)
        for key, time in exposed.items()
    }
    overlapped = hidden * len(rows)
    values: dict[str, Any] = {
        "duration": 100.0,
        "compute_only": 95.0 - total - overlapped,
        "overlapped": overlapped,
        "exposed": total,
        "idle": 5.0,
        "waiting": None,
        "host_copies": 0.0,
        "collectives": rows,
        "units": {},
    }
    return Split(**(values | changes))


FORWARD, BACKWARD = ("all_gather", "forward"), ("all_gather", "backward")
REDUCE = ("reduce_scatter", "backward")


@pytest.mark.parametrize(
    ("found", "settings", "expected"),
    [
        (mean({BACKWARD: 5}), Settings(), {"fsdp.backward_prefetch": "2", "fsdp.reshard_after_forward": "false"}),
        (
            mean({BACKWARD: 5}),
            Settings(backward_prefetch=0, reshard_after_forward=False),
            {"fsdp.backward_prefetch": "1"},
        ),
        (mean({FORWARD: 4}), Settings(), {"fsdp.forward_prefetch": "1"}),
        (mean({FORWARD: 4}), Settings(forward_prefetch=2), {"fsdp.forward_prefetch": "3"}),
        # hidden: shallower saves memory
        (mean({FORWARD: 0, BACKWARD: 0}, hidden=10), Settings(), {"fsdp.backward_prefetch": "0"}),
        (
            mean({FORWARD: 0.5, BACKWARD: 0.5}, hidden=10),
            Settings(forward_prefetch=1, backward_prefetch=3),
            {"fsdp.forward_prefetch": "0", "fsdp.backward_prefetch": "2"},
        ),
        (mean({FORWARD: 2, BACKWARD: 2}, hidden=10), Settings(), {"": ""}),  # neither: nothing stands out
        (mean({}), Settings(forward_prefetch=2, backward_prefetch=2), {"": ""}),  # nothing is gathered, nor hidden
        (
            mean({REDUCE: 8}),
            Settings(micro_batch_size=3, micro_batches=2),
            {"fsdp.reduce_every_micro_batch": "false", "train.micro_batch_size": "6"},
        ),
        (mean({REDUCE: 8}), Settings(), {"train.micro_batch_size": "2"}),  # one micro-batch: they are once a step
        (
            mean({REDUCE: 8}),
            Settings(reduce_every_micro_batch=False, micro_batches=2),
            {"train.micro_batch_size": "2"},
        ),
        (mean({REDUCE: 60}), Settings(), {"train.micro_batch_size": "2"}),
        (mean({}, idle=40.0, compute_only=60.0), Settings(), {"compile.enabled": "true"}),
        (mean({}, idle=40.0, host_copies=30.0), Settings(offload="params"), {"fsdp.offload": '"none"'}),
    ],
)  # fmt: skip
def test_cuda(found: Split, settings: Settings, expected: dict[str, str]) -> None:
    assert {one.key: one.value for one in advise(found, settings, device="cuda", waiting_by_rank={})} == expected


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
        ("", Settings()),
        ('[fsdp]\nstrategy = "shard_grad_op"', Settings(reshard_after_forward=False)),
        ('[fsdp]\nstrategy = "shard_grad_op"\nreshard_after_forward = true', Settings()),
        (
            '[fsdp]\nbackward_prefetch = 3\nforward_prefetch = 2\noffload = "params"\n[train]\nmicro_batch_size = 4',
            Settings(forward_prefetch=2, backward_prefetch=3, micro_batch_size=4, offload="params"),
        ),
        ('[fsdp]\nbackward_prefetch = "auto"', Settings()),  # another version's
        ('[fsdp]\nreduce_every_micro_batch = "never"', Settings()),
        ('[fsdp]\nreduce_every_micro_batch = "auto"', Settings()),
        ("[fsdp]\nreduce_every_micro_batch = false", Settings(reduce_every_micro_batch=False)),
        (
            '[fsdp]\nstrategy = "no_shard"',
            Settings(reduce_every_micro_batch=False, reshard_after_forward=False),
        ),
        ("[train]\nglobal_batch_size = 12\nmicro_batch_size = 3", Settings(micro_batch_size=3, micro_batches=4)),
        ("not TOML", Settings()),
    ],
)
def test_settings_are_the_runs(text: str, expected: Settings, tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "config.toml").write_text(text)
    file = tmp_path / "trace" / "rank-00000.json.gz"
    file.touch()
    assert read_settings(tmp_path) == read_settings(tmp_path / "trace") == read_settings(file) == expected
