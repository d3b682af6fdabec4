"""`eval.split` as a number: rows held out of the training data by their content, wherever they are read from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fsdp2kit.config.schema import ChatDataConfig, EvalConfig, TrainConfig, TrainingConfig
from fsdp2kit.data.build import Data, build_data
from fsdp2kit.data.held_out import hold_out, key_border
from fsdp2kit.errors import UserError
from fsdp2kit.train.evaluation import build_evaluation
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import make_tokenizer

TOKENIZER = make_tokenizer(None, eos="<|end|>")


def write(path: Path, texts: list[str]) -> str:
    return str(write_rows(path, [{"text": text, "id": number} for number, text in enumerate(texts)]))


def build(
    data: dict, *, split: float | str = 0.2, every: int = 1, dp: int = 1, rank: int = 0, steps: int | None = None
) -> Data:
    config = TrainingConfig.model_construct(
        recipe="x",
        data=ChatDataConfig.model_validate({"format": "text", "seq_len": 64, "pack": False, **data}),
        train=TrainConfig(steps=3, global_batch_size=4),
        eval=EvalConfig(every=every, split=split, steps=steps),
    )
    mesh = SimpleNamespace(dp_rank=rank, sizes=SimpleNamespace(dp=dp))
    return build_data(config, tokenizer=TOKENIZER, mesh=mesh)


def texts_of(loader) -> list[str]:
    """Every document that a loader of whole data holds, copies included."""
    documents = [part.documents[at] for part in loader.parts for at in range(len(part.documents))]
    return [TOKENIZER.decode(ids, skip_special_tokens=True) for ids, _ in documents]


def sides(data: Data) -> tuple[list[str], list[str]]:
    return sorted(texts_of(data.loader)), sorted(text for one in data.held_out.values() for text in texts_of(one))


TEXTS = [f"text number {number}" for number in range(200)]


def test_each_row_is_on_one_side_and_its_copies_with_it(tmp_path: Path) -> None:
    twice = TEXTS + TEXTS[::3]
    train, held_out = sides(build({"path": write(tmp_path / "a.jsonl", twice)}))
    assert sorted(train + held_out) == sorted(twice)
    assert not {*train} & {*held_out}
    assert 20 <= len({*held_out}) <= 60, "about a fifth"


def test_losses_on_other_held_out_rows_are_told_apart(tmp_path: Path) -> None:
    """By what an evaluation says that it measured by."""

    def measured_by(texts: list[str]) -> dict[str, str]:
        held_out = build({"path": write(tmp_path / "a.jsonl", texts)}).held_out
        evaluation = build_evaluation(EvalConfig(), None, held_out, plan=Any, mesh=Any)  # pyright: ignore
        assert evaluation is not None
        return dict(evaluation.measured_by)

    assert measured_by(TEXTS) == measured_by(TEXTS) != measured_by(TEXTS[:100])


def test_any_order_files_mesh_and_kind_hold_the_same_rows_out(tmp_path: Path) -> None:
    import datasets

    expected = sides(build({"path": write(tmp_path / "a.jsonl", TEXTS)}))
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "0.jsonl", shuffled[:50])
    write(tmp_path / "parts" / "1.jsonl", shuffled[50:])
    for rank in range(2):
        assert sides(build({"path": str(tmp_path / "parts")}, dp=2, rank=rank)) == expected
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"body": text, "id": number} for number, text in enumerate(shuffled)])
    rows.to_parquet(str(tmp_path / "a.parquet"))
    assert sides(build({"path": str(tmp_path / "a.parquet"), "columns": {"text": "body"}})) == expected
    longer = write(tmp_path / "b.jsonl", [*TEXTS, "another text"])
    assert {*sides(build({"path": longer}))[1]} >= {*expected[1]}, "more data moves no row"


def test_a_number_of_rows_over_all_parts_of_a_mix(tmp_path: Path) -> None:
    parts = [write(tmp_path / "a.jsonl", TEXTS[:150]), write(tmp_path / "b.jsonl", TEXTS[100:])]
    data = build({"sources": [{"path": part} for part in parts]}, split=30)
    train, held_out = sides(data)
    assert len({*held_out}) == 30
    assert not {*train} & {*held_out}, "a row that both parts have is on one side"
    assert {*train} | {*held_out} == {*TEXTS}
    assert {*data.held_out} == {"a", "b"}
    alone = sides(build({"path": write(tmp_path / "c.jsonl", TEXTS)}, split=30))
    assert {*alone[1]} == {*held_out}


def test_a_run_without_evaluations_leaves_the_same_rows_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    evaluated, quiet = build({"path": path}), build({"path": path}, every=0)
    assert quiet.held_out == {}
    assert quiet.fingerprint == evaluated.fingerprint
    assert len({build({"path": path}, split=split).fingerprint for split in (0.2, 0.1, 20, "train")}) == 4


def test_a_small_share_holds_a_row_and_all_rows_are_too_many(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS[:3])
    assert len(sides(build({"path": path}, split=0.0001))[1]) == 1
    with pytest.raises(UserError, match=r"^eval\.split: 3 holds out every row of data\.path"):
        build({"path": path}, split=3)


def stream_texts(data: Data, steps: int, *, first: int = 0) -> set[str]:
    found = set()
    for index in range(first, steps):
        for batch in data.loader.batch(index):
            for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
                size = 1 + sum(label != -100 for label in labels)
                found.add(TOKENIZER.decode(ids[:size], skip_special_tokens=True))
    return found


def test_a_stream_leaves_out_what_whole_data_does(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    train, held_out = sides(build({"path": path}))
    data = build({"path": path, "streaming": True}, steps=2)
    assert stream_texts(data, 60) == {*train}
    assert {*texts_of(data.held_out[""])} <= {*held_out}
    assert data.held_out[""].steps_per_epoch >= 2, "enough for an evaluation"
    everything = build({"path": path, "streaming": True}, steps=100)
    assert {*texts_of(everything.held_out[""])} == {*held_out}, "one pass, where that is not enough"
    assert data.fingerprint == everything.fingerprint
    assert data.fingerprint != build({"path": path, "streaming": True}, split=0.1, steps=2).fingerprint


def test_a_limit_is_the_first_rows_of_every_part_and_of_no_evaluation(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    data = build({"path": path, "limit": 7}, split="train", every=0)
    assert sorted(texts_of(data.loader)) == sorted(TEXTS[:7])
    streamed = build({"path": path, "limit": 7, "streaming": True}, split="train", every=0)
    assert stream_texts(streamed, 10) == {*TEXTS[:7]}
    prints = {build({"path": path, "limit": n, "streaming": True}, every=0, split="train").fingerprint for n in (7, 8)}
    assert len({*prints, data.fingerprint}) == 3
    other = write(tmp_path / "b.jsonl", TEXTS)
    sources = [{"path": path}, {"path": other, "limit": 3}]
    mixed = build({"sources": sources, "limit": 7}, split="train", every=0)
    assert [len(part.documents) for part in mixed.loader.parts] == [7, 3]


def test_a_limited_stream_resumes_within_its_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    options = {"path": path, "limit": 10, "streaming": True}
    straight, resumed = (build(options, split="train", every=0).loader for _ in range(2))
    for index in range(3):
        straight.batch(index)
    resumed.seek(3, json.loads(json.dumps(straight.state(3))))
    for index in range(3, 6):
        one, other = ([batch.input_ids.tolist() for batch in loader.batch(index)] for loader in (straight, resumed))
        assert one == other


@pytest.mark.parametrize("part", [{"limit": 140}, {"split": "train[20:]"}, {"split": "train[20:]", "limit": 140}])
def test_a_stream_of_some_rows_goes_on_with_the_next_one(part: dict, tmp_path: Path) -> None:
    """It is resumed in its second window: the first reads its rows from the start again."""
    options = {"path": write(tmp_path / "a.jsonl", TEXTS), "streaming": True, **part}
    straight, resumed = (build(options, split="train", every=0) for _ in range(2))
    expected = TEXTS[20 if "split" in part else 0 :][: part.get("limit")]
    assert stream_texts(straight, 20) == {*expected[:80]}
    resumed.loader.seek(20, json.loads(json.dumps(straight.loader.state(20))))
    assert stream_texts(resumed, len(expected) // 4, first=20) == {*expected[80:]}


def test_rows_that_are_too_long_fill_a_pack_each(tmp_path: Path) -> None:
    """A stream holds out as many as the evaluation asks for; a table is enough for it."""
    long = [f"{text} " * 40 for text in TEXTS]
    path = write(tmp_path / "a.jsonl", long)
    options = {"path": path, "pack": True, "overlong": "truncate"}
    assert build(options, split=0.5).held_out[""].steps_per_epoch >= 20
    assert build({**options, "streaming": True}, split=0.5, steps=20).held_out[""].steps_per_epoch >= 20


@pytest.mark.parametrize(
    ("held_out", "expected"),
    [
        (1, [[1, 2], [1]]),
        (2, [[1, 2], [0, 1]]),  # copies count once
        (3, [[1, 2, 3], [0, 1]]),
        (1e-30, [[1, 2], [1]]),  # at least one row
    ],
)
def test_the_rows_of_the_smallest_keys_are_held_out(held_out: float, expected: list[list[int]]) -> None:
    keys = [np.array([2**64 - 1, 3, 3, 7], dtype=np.uint64), np.array([5, 3, 8], dtype=np.uint64)]
    found = hold_out(keys, held_out, names=["a", "b"])
    assert [held.tolist() for _, held in found] == expected
    assert [train.tolist() for train, _ in found] == [
        [line for line in range(len(key)) if line not in held] for key, held in zip(keys, expected, strict=True)
    ]
    assert key_border(0.25) == 2**62
