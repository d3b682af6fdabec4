"""Documents: cached, cut by policy, counted, and recognised by their content."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest

from fsdp2kit.config.schema import ChatDataConfig, ColumnsConfig, DataConfig, TextDataConfig
from fsdp2kit.data import tables
from fsdp2kit.data.documents import Documents, build_documents, check_vocabulary, find_document_warnings
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.documents import as_documents
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import make_tokenizer
from tests.support.workers import WorkerPool

CHAT = [
    {"messages": [{"role": "user", "content": "Wet?"}, {"role": "assistant", "content": "Yes."}]},
    {"messages": [{"role": "user", "content": "Is water wet? " * 8}, {"role": "assistant", "content": "Yes. " * 8}]},
    {"messages": [{"role": "user", "content": "Nobody answers."}]},
]


def chat(path: Path | str, *, tokenizer=None, **options) -> Documents:
    tokenizer = tokenizer or make_tokenizer(templates.MARKED_WIDE)
    return build_documents(ChatDataConfig(path=str(path), **options), tokenizer=tokenizer)


def text(path: Path, tokenizer, **options) -> Documents:
    return build_documents(TextDataConfig(path=str(path), **options), tokenizer=tokenizer)


def contents(documents: Documents) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), mask.tolist()) for ids, mask in (documents[at] for at in range(len(documents)))]


def test_chat_documents_are_what_the_mask_says(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(templates.MARKED_WIDE)
    documents = chat(write_rows(tmp_path / "a.jsonl", CHAT), tokenizer=tokenizer)
    assert len(documents) == 2
    ids, supervised = documents[0]
    assert ids.dtype == np.int64
    assert supervised.dtype == bool
    assert tokenizer.decode(ids[supervised]) == "Yes.<|im_end|>"
    assert documents.lengths.tolist() == [len(documents[0][0]), len(documents[1][0])]
    report = documents.report
    assert (report.rows, report.documents, report.unsupervised) == (3, 2, 1)
    assert report.tokens == documents.lengths.sum()
    assert report.supervised_tokens == sum(documents[at][1][1:].sum() for at in range(2))
    assert documents.largest_id == max(documents[at][0].max() for at in range(2))


def test_the_second_start_tokenises_nothing_and_an_edit_does(tmp_path: Path, monkeypatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", CHAT)
    first = chat(path, seq_len=64)
    original = tables.encode_documents
    monkeypatch.setattr(tables, "encode_documents", lambda *_, **__: pytest.fail("tokenised again"))
    assert contents(chat(path, seq_len=64)) == contents(first)
    chat(path, seq_len=128, overlong="split")  # the cut is no part of the cache
    monkeypatch.setattr(tables, "encode_documents", original)
    stat = path.stat()
    write_rows(path, [{"messages": [CHAT[0]["messages"][0], {"role": "assistant", "content": "No.."}]}, *CHAT[1:]])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # not even the time may hide an edit
    edited = chat(path, seq_len=64)
    assert edited.fingerprint != first.fingerprint
    assert chat(path, tokenizer=make_tokenizer(templates.CHATML)).lengths[0] > edited.lengths[0]


def test_other_rows_of_the_same_file_are_not_read_from_the_cache(tmp_path: Path) -> None:
    """The file is the same; what is taken of it differs by `limit`, by a slice, or by both."""
    answers = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Yes."}]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": answers}] * 6)
    counts = [({}, 6), ({"limit": 2}, 2), ({"limit": 5}, 5), ({"split": "train[:3]"}, 3), ({"split": "train[2:]"}, 4)]
    counts.append(({"split": "train[2:]", "limit": 1}, 1))
    for options, count in counts:
        assert len(chat(path, **options)) == count, options


def test_the_fingerprint_is_of_what_the_model_sees(tmp_path: Path) -> None:
    here = chat(write_rows(tmp_path / "a.jsonl", CHAT))
    assert chat(write_rows(tmp_path / "elsewhere" / "b.jsonl", CHAT)).fingerprint == here.fingerprint
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(CHAT).to_parquet(str(tmp_path / "a.parquet"))
    assert chat(str(tmp_path / "a.parquet")).fingerprint == here.fingerprint
    assert chat(str(tmp_path / "a.jsonl"), seq_len=32).fingerprint != here.fingerprint
    assert chat(write_rows(tmp_path / "c.jsonl", CHAT[1::-1])).fingerprint != here.fingerprint
    wide = make_tokenizer(templates.MARKED_WIDE.replace("+ '<|im_end|>\n' }}{%- endg", "}}{%- endg"))
    assert chat(str(tmp_path / "a.jsonl"), tokenizer=wide).fingerprint != here.fingerprint


def test_a_cut_answer_keeps_its_end_of_turn(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", CHAT)
    whole = chat(path)
    ids, supervised = whole[1]
    [ending] = make_tokenizer(None).convert_tokens_to_ids(["<|im_end|>"])
    assert ids[supervised][-1] == ending
    first_target = int(np.flatnonzero(supervised)[0])
    cut = chat(path, seq_len=first_target + 3)
    assert cut.report.truncated == 1
    assert cut[1][0].tolist() == [*ids[: first_target + 2], ending]
    assert cut[1][1].tolist() == [*supervised[: first_target + 2], True]
    assert cut.report.supervised_tokens == whole[0][1].sum() + 3
    assert cut.fingerprint != chat(path, seq_len=first_target + 3, overlong="split").fingerprint


def test_a_cut_elsewhere_invents_nothing(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", CHAT)
    first_target = int(np.flatnonzero(chat(path)[1][1])[0])
    gone = chat(path, seq_len=first_target)
    assert (len(gone), gone.report.truncated, gone.report.unsupervised) == (1, 1, 2)
    # In the question that follows an answer, nothing is learnt: the document ends as it is.
    turns = [*CHAT[0]["messages"], {"role": "user", "content": "Is water wet? " * 8}, CHAT[0]["messages"][1]]
    path = write_rows(tmp_path / "b.jsonl", [{"messages": turns}])
    [(ids, mask)] = contents(chat(path))
    inside = int(np.flatnonzero(mask)[len(np.flatnonzero(mask)) // 2 - 1]) + 12
    assert contents(chat(path, seq_len=inside)) == [(ids[:inside], mask[:inside])]


def test_cut_text_ends(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None, eos="<|end|>")
    path = write_rows(tmp_path / "a.jsonl", [{"text": "Is water wet? " * 8}])
    [(ids, mask)] = contents(text(path, tokenizer, seq_len=9, overlong="truncate"))
    assert tokenizer.decode(ids).endswith("<|end|>")
    assert (len(ids), all(mask)) == (9, True)


@pytest.mark.parametrize("workers", [2, 3, "auto"])
def test_workers_change_nothing(workers, tmp_path: Path, datasets_cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(tables, "_TABLE_BLOCK", 4)
    monkeypatch.setattr(tables, "_WORTH_WORKERS", 8)
    path = write_rows(tmp_path / "a.jsonl", CHAT * 5)
    with_workers = chat(path, workers=workers)
    assert contents(chat(path)) == contents(with_workers), "read from the cache that they filled"
    tokens_of = [(documents.fingerprint, contents(documents)) for documents in (with_workers,)]
    shutil.rmtree(datasets_cache)
    alone = chat(path, workers=0)
    assert tokens_of == [(alone.fingerprint, contents(alone))]


def test_a_worker_that_meets_a_mistake_names_the_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*CHAT, {"messages": [{"role": "user"}]}])
    with pytest.raises(UserError, match=r"a\.jsonl:4: messages\[0\] has no content"):
        chat(path, workers=2)
    assert not list(Path(datasets.config.HF_DATASETS_CACHE).rglob("*.*")), "nothing of it is kept"


def test_long_rows_are_dropped_split_or_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", CHAT)
    whole = chat(path)
    seq_len = int(whole.lengths[1]) - 5
    dropped = chat(path, seq_len=seq_len, overlong="drop")
    assert (dropped.report.dropped, len(dropped)) == (1, 1)
    split = chat(path, seq_len=seq_len, overlong="split")
    assert split.report.split == 1
    assert np.concatenate([split[1][0], split[2][0]]).tolist() == whole[1][0].tolist()
    with pytest.raises(UserError, match=rf"a\.jsonl:2: {whole.lengths[1]} tokens, more than data.seq_len = {seq_len}"):
        chat(path, seq_len=seq_len, overlong="error")
    with pytest.raises(UserError, match="all 3 rows are longer"):
        chat(path, seq_len=2, overlong="drop")


def test_the_first_token_of_a_piece_is_no_target(tmp_path: Path) -> None:
    row = {"input_ids": [*range(5, 13)], "loss_mask": [0, 1, 0, 0, 1, 0, 0, 0]}
    section = DataConfig(path=write_rows(tmp_path / "a.jsonl", [row]).as_posix(), format="tokens", seq_len=4)
    section = section.model_copy(update={"overlong": "split"})
    documents = build_documents(section, tokenizer=make_tokenizer(templates.MARKED_WIDE))
    assert contents(documents) == [([5, 6, 7, 8], [False, True, False, False])]
    assert (documents.report.supervised_tokens, documents.report.unsupervised) == (1, 1)


def test_text_has_the_tokenizers_bos_and_an_eos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None, eos="<|end|>")
    path = write_rows(tmp_path / "a.jsonl", [{"text": "Is water wet?"}, {"text": ""}, {"text": "Yes."}])
    documents = text(path, tokenizer, seq_len=64)
    assert [tokenizer.decode(documents[at][0]) for at in range(3)] == [
        "<|begin|>Is water wet?<|end|>",
        "<|begin|><|end|>",
        "<|begin|>Yes.<|end|>",
    ]
    assert all(documents[at][1].all() for at in range(3))
    assert documents.report.supervised_tokens == documents.lengths.sum() - 3
    pieces = text(path, tokenizer, seq_len=4)
    whole = contents(documents)[0][0]
    assert [ids for ids, _ in contents(pieces)][: len(whole) // 4] == [
        whole[at : at + 4] for at in range(0, len(whole) // 4 * 4, 4)
    ]


def test_text_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="text is of type int"):
        text(write_rows(tmp_path / "b.jsonl", [{"text": 1}]), make_tokenizer(None))


def test_nothing_to_learn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no document holds a token to learn \(1 row\)"):
        chat(write_rows(tmp_path / "a.jsonl", CHAT[2:]))
    message = r"all 1 rows are cut at data\.seq_len = 3 before their first token to learn; raise it"
    with pytest.raises(UserError, match=message):
        chat(write_rows(tmp_path / "b.jsonl", CHAT[:1]), seq_len=3, overlong="truncate")


def test_what_is_missing_is_named() -> None:
    tokenizer = make_tokenizer(None)
    with pytest.raises(UserError, match=r"data\.path: is required"):
        build_documents(ChatDataConfig(), tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"model\.tokenizer: is required"):
        build_documents(ChatDataConfig(path="a.jsonl"), tokenizer=None)


def synthetic(seed: int, seq_len: int = 64) -> Documents:
    section = TextDataConfig(format="synthetic", seq_len=seq_len)
    return build_documents(section, tokenizer=None, seed=seed, vocab_size=100)


def test_synthetic_documents_depend_on_the_seed_alone() -> None:
    documents = synthetic(1)
    assert documents.lengths.min() >= 8
    assert documents.lengths.max() == 64
    ids, supervised = documents[7]
    assert len(ids) == len(supervised) == documents.lengths[7]
    assert 0 <= ids.min() <= ids.max() < 100
    assert np.array_equal(ids, synthetic(1)[7][0])
    assert documents.fingerprint == synthetic(1).fingerprint != synthetic(2).fingerprint
    assert not np.array_equal(ids, synthetic(2)[7][0])


def test_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    documents = synthetic(0)
    check_vocabulary(documents.largest_id, 100)
    with pytest.raises(UserError, match="token id 99, but the model's vocabulary has 99"):
        check_vocabulary(documents.largest_id, 99)


def build_on_a_rank(path: str, cache: str) -> tuple[str, int]:
    """Runs in a worker: rank 0 tokenises, rank 1 only reads what it finds."""
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    calls, original = [], tables.encode_documents
    tables.encode_documents = lambda *args, **options: (calls.append(1), original(*args, **options))[1]
    try:
        return chat(path).fingerprint, len(calls)
    except UserError as error:
        return str(error), len(calls)
    finally:
        tables.encode_documents = original


def test_one_rank_tokenises_and_all_agree(pool: WorkerPool, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", CHAT)
    (first, calls_of_first), (second, calls_of_second) = pool.run(
        2, build_on_a_rank, str(path), str(tmp_path / "cache")
    )
    assert first == second == chat(path).fingerprint
    assert (calls_of_first, calls_of_second) == (1, 0)
    missing = pool.run(2, build_on_a_rank, str(tmp_path / "missing.jsonl"), str(tmp_path / "cache"))
    assert [error for error, _ in missing] == [missing[0][0]] * 2
    assert "no such file" in missing[0][0]


@pytest.mark.parametrize(
    "change",
    [{"format": "preference"}, {"columns": {"prompt": "x"}}, {"train_on": "last"}, {"wrap": "chat"}, "template"],
)
def test_what_changes_tokens_is_in_the_key_of_the_cache(change: dict | str) -> None:
    options = change if isinstance(change, dict) else {}
    template = templates.CHATML if change == "template" else templates.MARKED_WIDE
    section = DataConfig(path="x", format="prompt_completion")
    key = tables.cache_key("c", section, make_tokenizer(templates.MARKED_WIDE))
    other = section.model_copy(update={**options, "columns": ColumnsConfig(**options.get("columns", {}))})
    assert tables.cache_key("c", other, make_tokenizer(template)) != key
    assert tables.cache_key("d", section, make_tokenizer(templates.MARKED_WIDE)) != key


@pytest.mark.parametrize(
    ("report", "digests", "found"),
    [
        ({}, "abc", []),
        ({}, "aba", ["1 documents are copies of earlier ones"]),
        ({"split": 1}, "aba", []),
        ({"truncated": 5}, "abc", []),
        ({"truncated": 3, "dropped": 3}, "abc", ["6% of the rows are longer than seq_len"]),
        ({"supervised_tokens": 6}, "abc", []),
        ({"supervised_tokens": 5}, "abc", ["only 4.2% of the tokens are learnt"]),
        ({"unsupervised": 1}, "abc", ["1 rows hold nothing to learn and are left out"]),
    ],
)
def test_documents_are_warned_of_from_a_threshold_on(report: dict, digests: str, found: list[str]) -> None:
    tokenizer = make_tokenizer(None)
    ends = (tokenizer.eos_token_id, True)
    documents = as_documents([[(5, True), (6, True)] * 19 + [(5, True), ends]] * 3)
    documents = dataclasses.replace(
        documents,
        report=dataclasses.replace(documents.report, **{"supervised_tokens": 100, **report}),
        row_lengths=np.full(100, 40),
        row_digests=np.frombuffer("".join(one * 16 for one in digests).encode(), dtype="V16"),
    )
    texts = find_document_warnings(documents, tokenizer)
    assert [text[: len(start)] for text, start in zip(texts, found, strict=True)] == found


def test_synthetic_documents_have_every_length_from_an_eighth_on() -> None:
    documents = build_documents(DataConfig(format="synthetic", seq_len=32), tokenizer=None, vocab_size=3)
    assert set(documents.lengths.tolist()) == set(range(4, 33))
    assert {int(one) for at in range(9) for one in documents[at][0]} == {0, 1, 2}
    assert documents.report.supervised_tokens == documents.lengths.sum() - len(documents)
