"""What a page is given: curves, what they are thinned to, charts, tables."""

from __future__ import annotations

import itertools
import json
import random
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp2kit.report.charts import SECTIONS, sections_for
from fsdp2kit.report.curves import MetricColumns, thinned
from fsdp2kit.report.payload import build_payload, labels
from fsdp2kit.report.read import read_run
from tests.report.helpers import EVENTS, record, write_run


def steps_of(curve: dict[str, Any], name: str = "x") -> list[int]:
    return list(itertools.accumulate(curve[name]))


def titles(payload: dict[str, Any]) -> list[str]:
    return [chart["title"] for section in payload["sections"] for chart in section["charts"]]


def table(payload: dict[str, Any], title: str) -> list[list[Any]]:
    return next(one["rows"] for one in payload["tables"] if one["title"] == title)


def test_a_short_curve_stays_whole() -> None:
    curve = thinned([2, 4, 9], [1.0, 0.123456789, -3], most=3)
    assert curve == {"x": [2, 2, 5], "y": [1.0, 0.12346, -3]}


def test_a_long_curve_keeps_its_ends_and_every_spike() -> None:
    generator = random.Random(1)
    steps = list(range(10, 500_010, 10))
    values = [generator.gauss(0, 1) for _ in steps]
    values[31_007], values[44_001] = 99.0, -77.0
    curve = thinned(steps, values, most=3000)
    kept = dict(zip(steps_of(curve), curve["y"], strict=True))
    assert len(curve["y"]) + len(curve["my"]) <= 3002
    assert kept[310_080] == 99.0
    assert kept[440_020] == -77.0
    assert kept[10] == float(f"{values[0]:.5g}")
    assert kept[500_000] == float(f"{values[-1]:.5g}")
    assert all(kept[step] == float(f"{values[step // 10 - 1]:.5g}") for step in kept)
    assert sorted(kept) == list(kept)


def test_the_means_of_a_long_curve_are_those_of_its_parts() -> None:
    curve = thinned(list(range(1, 102)), [float(value) for value in range(101)], most=33)
    # 99 values between the ends, in 11 parts of 9: 1..9, 10..18, …
    assert curve["my"] == [5.0 + 9 * part for part in range(11)]
    assert steps_of(curve, "mx") == [6 + 9 * part for part in range(11)]  # step = value + 1


def test_hours_leave_out_what_passes_between_two_starts() -> None:
    columns = MetricColumns()
    times = {1: "10:00:00", 2: "10:00:10", 3: "20:00:00", 4: "20:00:10"}
    for step, time in times.items():
        start = {1: 1, 3: 2}.get(step)
        columns.add([record(step, start=start) | {"time": f"2026-11-25T{time}+00:00"}])
    assert [round(hours * 3600, 3) for hours in columns.hours] == [30, 40, 70, 80]  # 30 s to each first step


def test_a_step_is_split_by_its_slowest_rank() -> None:
    columns = MetricColumns()
    columns.add([record(1)])
    found = {key.removeprefix("split/"): values[0] for key, (_, values) in columns.values.items() if "split/" in key}
    # 0.805 of 2 s are its own; the others' median is that ÷ 1.25.
    assert found == pytest.approx({"data": 0.01, "compute": 1.6, "exchange": 0.39, "others_wait": 1.61 * 0.2})


def test_what_is_not_finite_or_no_number_is_no_point() -> None:
    columns = MetricColumns()
    rows = [{"step": 1, "loss": None, "mine": True}, {"step": 2, "loss": float("nan")}, {"step": 2, "loss": 1.0}]
    columns.add([*rows, {"step": 3, "loss": 2.0}, {"loss": 5.0}, {"step": "4"}])
    assert columns.values == {"loss": ([3], [2.0])}
    assert columns.steps == [1, 2, 3]


def test_every_metric_of_the_docs_has_a_chart_and_others_get_their_own() -> None:
    known = {key for _, charts in SECTIONS for chart in charts for key, _ in chart.lines}
    assert {"loss", "eval_loss", "reward", "margin", "log_prob_gap", "mfu", "accuracy", "seconds/*"} <= known
    sections = sections_for({"loss", "my_metric", "loss/chat", "rewards/chosen", "slowest_rank/data"})
    assert [(section["title"], [chart["title"] for chart in section["charts"]]) for section in sections] == [
        ("Learning", ["Loss", "Loss by source"]),
        ("Preferences", ["Rewards of answers"]),
        ("Other metrics", ["my_metric"]),
    ]


def test_a_plan_is_a_line_beside_what_was_measured() -> None:
    keys = {"memory_gib/forward", "memory_gib/backward", "memory_gib/optimizer"}
    (section,) = sections_for(keys, {"memory_gib/forward", "memory_gib/load"})
    (chart,) = section["charts"]
    assert [line["key"] for line in chart["lines"]] == [*sorted(keys), "plan:memory_gib/forward"]
    (section,) = sections_for(keys, {"memory_gib/forward"}, splits=True)
    assert [[line["key"] for line in chart["lines"]] for chart in section["charts"]] == [
        ["memory_gib/backward"],
        ["memory_gib/forward", "plan:memory_gib/forward"],
        ["memory_gib/optimizer"],
    ]


def test_a_run_with_a_restart(tmp_path: Path) -> None:
    payload = build_payload([read_run(write_run(tmp_path / "x", events=EVENTS))])
    (run,) = payload["runs"]
    assert (run["name"], run["state"], run["step"], run["total_steps"]) == ("x", "ended", 50, 50)
    assert (run["starts"], run["saves"], run["plan"]["memory_gib/backward"]) == ([20], [20], 11.0)
    assert [warning["step"] for warning in run["warnings"]] == [3, 7]
    assert run["samples"][0]["also"] == {"reward": "1.0"}
    first, second = table(payload, "Starts")
    assert (first[2:4], first[5]) == ([0, 8], "stopped at step 20")
    assert second[2:6] == [20, 4, "optimizer.lr: 0.001 → 0.0005", "done at step 50"]
    ends = [event["time"] for event in read_run(tmp_path / "x").of_kind("end")]
    assert [first[6], second[6]] == [f"{datetime.fromtimestamp(end, timezone.utc):%Y-%m-%d %H:%M}" for end in ends]
    assert table(payload, "Saves") == [[20, 3.5, 0.25, "4 GB", "background"]]
    assert ["sources.chat", "800"] in table(payload, "Data")
    assert ["storage", "float32"] in table(payload, "Dtypes")
    assert ["train.steps", "50"] in table(payload, "Configuration")
    figures = {label: value for label, value, _ in run["figures"]}
    assert figures["waited for saves"] == 0.25
    assert figures["peak memory"] == 10.5
    # Curves that have the same steps share them.
    assert len(run["xs"]) == 2
    assert run["curves"]["loss"]["x"] == run["curves"]["lr"]["x"] != run["curves"]["eval_loss"]["x"]


def test_several_runs_have_a_table_of_what_differs(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "x", config="[train]\nsteps = 50\nglobal_batch_size = 8\n")
    other = write_run(tmp_path / "b" / "x", config="[train]\nsteps = 50\nglobal_batch_size = 16\n", tokens=1000)
    payload = build_payload([read_run(one), read_run(other)])
    assert [run["name"] for run in payload["runs"]] == ["a/x", "b/x"]
    assert table(payload, "What differs in the configurations") == [["train.global_batch_size", "8", "16"]]
    ends = [list(itertools.accumulate(run["axes"]["tokens"]))[-1] for run in payload["runs"]]
    assert ends == [25_000, 50_000]
    assert "Memory by phase: forward" in titles(payload)


def test_a_run_without_evaluation_or_events_leaves_out_what_it_has_not(tmp_path: Path) -> None:
    payload = build_payload([read_run(write_run(tmp_path / "x", evaluates=0))])
    assert "Held-out perplexity" not in titles(payload)
    loss = payload["sections"][0]["charts"][0]
    assert [line["key"] for line in loss["lines"]] == ["loss"]
    assert "Saves" not in [one["title"] for one in payload["tables"]]


@pytest.mark.full
def test_fifty_thousand_steps_stay_small(tmp_path: Path) -> None:
    columns, generator = MetricColumns(), np.random.default_rng(1)
    steps = list(range(1, 50_001))
    columns.steps, columns.tokens, columns.hours = steps, steps, [step / 3600 for step in steps]
    columns.values = {f"metric {place}": (steps, generator.normal(size=50_000).tolist()) for place in range(30)}
    run = read_run(write_run(tmp_path / "x", steps=1))
    assert len(json.dumps(build_payload([run], [columns]))) < 2_500_000
    assert len(json.dumps(build_payload([run] * 3, [columns] * 3))) < 2_500_000


def test_labels_are_the_shortest_that_differ(tmp_path: Path) -> None:
    assert labels([Path("runs/x")]) == ["x"]
    assert labels([Path("a/x"), Path("b/x"), Path("b/y")]) == ["a/x", "b/x", "b/y"]
    assert labels([Path("a/x"), Path("a/x")]) == ["a/x", "a/x"]
