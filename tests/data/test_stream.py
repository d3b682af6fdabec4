"""Streams: every token once a pass and in order, resumed anywhere on any mesh, in memory that does not grow."""

from __future__ import annotations

import copy
import itertools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp2kit.data.loader import Share
from fsdp2kit.data.stream import StreamLoader
from fsdp2kit.errors import UserError
from fsdp2kit.model.loss_head import IGNORE
from tests.data.helpers.files import write_rows
from tests.data.helpers.streams import GLOBAL, SEQ_LEN, TOKENIZER, rows_of, stream
from tests.support.models import full

MESHES = [(dp, micro) for dp in (1, 2, 4) for micro in (1, 2) if 4 % (dp * micro) == 0]


def documents_in(batches) -> list[list[int]]:
    """The documents of some micro-batches, found by their positions."""
    found = []
    for batch in batches:
        for ids, labels, positions in zip(
            batch.input_ids.tolist(), batch.labels.tolist(), batch.position_ids.tolist(), strict=True
        ):
            starts = [at for at, position in enumerate(positions) if position == 0]
            for start, stop in zip(starts, [*starts[1:], SEQ_LEN], strict=True):
                if any(label != IGNORE for label in labels[start:stop]):
                    found.append(ids[start:stop])
    return found


def global_batch(paths, index: int, states: list, mesh: tuple[int, int], **options) -> list:
    """Global batch ``index`` put together from the ranks of a mesh that starts there; appends the state after it."""
    dp, micro = mesh
    whole, after = [], []
    for rank in range(dp):
        loader = stream(paths, dp=dp, rank=rank, micro=micro, **options).loader
        assert isinstance(loader, StreamLoader)
        loader.seek(index, states[-1])
        for batch in loader.batch(index):
            whole += zip(*(part.tolist() for part in (batch.input_ids, batch.labels, batch.position_ids)), strict=True)
        after.append(json.loads(json.dumps(loader.state(index + 1))))
    assert all(state == after[0] for state in after), "every rank would save the same"
    states.append(after[0])
    return whole


LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=60)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.booleans(), st.lists(st.sampled_from(MESHES), min_size=3, max_size=8))
def test_stopped_after_every_batch_and_taken_up_on_another_mesh(tmp_path: Path, lengths, pack, meshes) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(lengths))
    states: list = [None]
    resumed = [global_batch(path, index, states, mesh, pack=pack) for index, mesh in enumerate(meshes)]
    straight = stream(path, micro=GLOBAL, pack=pack).loader
    for index, rows in enumerate(resumed):
        [batch] = straight.batch(index)
        parts = (batch.input_ids, batch.labels, batch.position_ids)
        assert rows == list(zip(*(part.tolist() for part in parts), strict=True))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.booleans())
def test_a_pass_gives_every_token_once_and_in_order(tmp_path: Path, lengths, pack) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(lengths))
    pieces = []
    for row in rows_of(lengths):
        ids = row["input_ids"]
        pieces += [ids[at : at + SEQ_LEN] for at in range(0, len(ids), SEQ_LEN)]
    expected = sorted(piece for piece in pieces if len(piece) > 1)
    loader, found, index = stream(path, pack=pack).loader, [], 0
    while len(found) < 2 * len(expected):
        found += documents_in(loader.batch(index))
        index += 1
    assert sorted(found[: len(expected)]) == expected, "the first pass"
    assert sorted(found[len(expected) : 2 * len(expected)]) == expected, "the second"


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet", "saved"])
def test_every_kind_of_file_goes_on_where_it_stopped(kind: str, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    rows = [{"text": f"row {number} " + "water " * (number % 7)} for number in range(200)]
    for part, some in enumerate((rows[:150], rows[150:])):
        path = tmp_path / f"{part}.{kind}"
        if kind == "jsonl":
            write_rows(path, some)
        elif kind == "json":
            path.write_text(json.dumps(some))
        elif kind == "txt":
            path.write_text("".join(row["text"] + "\n" for row in some))
        elif kind == "saved":
            datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
        else:
            getattr(datasets.Dataset.from_list(some), f"to_{kind}")(str(path))
    source = tmp_path / "saved" if kind == "saved" else Path(f"{tmp_path}/*.{kind}")
    straight = stream(source, format="text").loader
    expected = [[batch.input_ids.tolist() for batch in straight.batch(index)] for index in range(60)]
    loader = stream(source, format="text").loader
    for index in (7, 31, 32, 59):
        state = json.loads(json.dumps(straight_state(source, index)))
        loader.seek(index, state)
        assert [batch.input_ids.tolist() for batch in loader.batch(index)] == expected[index], index


def straight_state(source: Path, index: int) -> dict:
    loader = stream(source, format="text").loader
    for at in range(index):
        loader.batch(at)
    return loader.state(index)


def test_a_mix_keeps_its_shares_of_tokens(tmp_path: Path) -> None:
    paths = [
        write_rows(tmp_path / f"{name}.jsonl", rows_of(lengths))
        for name, lengths in (("a", [9] * 50), ("b", [5] * 70))
    ]
    loader = stream(paths, weights=[3.0, 1.0]).loader
    assert loader.source_names == ("a", "b")
    for index in range(40):
        loader.batch(index)
    first, second = loader.state(40)["tokens"]
    assert first / (first + second) == pytest.approx(0.75, abs=0.01)
    states: list = [None]
    mixed = [global_batch(paths, index, states, MESHES[index % len(MESHES)], weights=[3.0, 1.0]) for index in range(6)]
    straight = stream(paths, weights=[3.0, 1.0], micro=GLOBAL).loader
    assert [[row[0] for row in rows] for rows in mixed] == [
        straight.batch(at)[0].input_ids.tolist() for at in range(6)
    ]


def test_packing_is_nearly_full(tmp_path: Path) -> None:
    lengths = [2 + (at * 7919) % 11 for at in range(3000)]
    loader = stream(write_rows(tmp_path / "a.jsonl", rows_of(lengths)), seq_len=64).loader
    batches = [batch for index in range(50) for batch in loader.batch(index)]
    assert sum(batch.input_tokens for batch in batches) / sum(batch.capacity for batch in batches) > 0.98


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
def test_a_stream_and_a_table_are_cut_alike(overlong: str, tmp_path: Path) -> None:
    ids = [*range(100, 120), *TOKENIZER.convert_tokens_to_ids(["<|end|>"])]
    in_answer = {"input_ids": ids, "labels": [IGNORE] * 2 + ids[2:]}
    in_question = {"input_ids": ids, "labels": [IGNORE] * 2 + ids[2:6] + [IGNORE] * 12 + ids[18:]}
    path = write_rows(tmp_path / "a.jsonl", [in_answer, in_question, *rows_of([5, 40, 16, 17])])
    options = {"overlong": overlong, "micro": GLOBAL, "pack": False, "shuffle": False}
    streamed, whole = (stream(path, streaming=streaming, **options).loader.batch(0)[0] for streaming in (True, False))
    assert (streamed.labels[:2] == whole.labels[:2]).all()
    assert (streamed.input_ids[:2] == whole.input_ids[:2]).all()


def test_a_long_row_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of([5, 40]))
    with pytest.raises(UserError, match=r"a\.jsonl:2: 40 tokens, more than data.seq_len = 16"):
        stream(path, overlong="error").loader.batch(0)


@pytest.mark.parametrize("workers", [0, full(1)])
def test_a_malformed_row_in_the_middle_is_named(workers: int, tmp_path: Path) -> None:
    rows = [json.dumps(row) for row in rows_of([12] * 2000)]
    rows[1500] = '{"input_ids": [1, 2'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    loader = stream(tmp_path / "a.jsonl", workers=workers).loader
    for index in range(100):
        loader.batch(index)  # what comes before it is trained on
    with pytest.raises(UserError, match=r"a\.jsonl:1501: not valid JSON"):
        [loader.batch(index) for index in range(100, 500)]


@pytest.mark.full
def test_workers_change_nothing(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": f"water {number}"} for number in range(400)])
    alone, helped = (stream(path, format="text", workers=workers).loader for workers in (0, 2))
    for index in range(30):
        pairs = zip(alone.batch(index), helped.batch(index), strict=True)
        assert all((one.input_ids == other.input_ids).all() for one, other in pairs)


def test_nothing_to_learn_ends(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1]}] * 5)
    with pytest.raises(UserError, match=r"no document holds a token to learn"):
        stream(path).loader.batch(0)
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(UserError, match="there are no rows"):
        stream(tmp_path / "b.jsonl").loader.batch(0)


def test_a_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [1, 10**6]}])
    with pytest.raises(UserError, match="token id 1000000, but the model's vocabulary has 1000000"):
        stream(path).loader.batch(0)


@pytest.mark.full
def test_memory_does_not_grow(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": list(range(2, 2 + 2 + row % 14))} for row in range(20000)])
    loader, peaks, index = stream(path).loader, [], 0
    tracemalloc.start()
    try:
        for _ in range(4):
            tracemalloc.reset_peak()
            for _ in range(200):
                loader.batch(index)
                index += 1
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert max(peaks[1:]) < 1.2 * peaks[0], peaks


def test_another_batch_than_the_next_is_refused(tmp_path: Path) -> None:
    loader = stream(write_rows(tmp_path / "a.jsonl", rows_of([9] * 400))).loader
    for index in range(30):
        loader.batch(index)
    for asked_for in (loader.state, loader.batch):
        with pytest.raises(ValueError, match="next batch is 30, not 3"):
            asked_for(3)


def test_one_state_is_taken_up_twice() -> None:
    def packs(state: dict | None) -> Iterator[tuple[list, dict]]:
        for number in itertools.count(state["number"] if state else 0):
            yield [(np.arange(3) + 10 * number, np.ones(3, dtype=bool))], {"number": number + 1}

    loader = StreamLoader([packs, packs], share=Share(seq_len=4, global_batch_size=3), weights=[0.25, 0.75])
    loader.batch(0)
    state = loader.state(1)
    before = copy.deepcopy(state)
    found = []
    for _ in range(3):
        batches = loader.batch(1) + loader.batch(2)
        found.append([(batch.input_ids.tolist(), batch.sources.tolist(), batch.rows) for batch in batches])
        loader.seek(1, state)
    assert state == before
    assert found[0] == found[1] == found[2]
