"""The preview shows exactly the documents and masks that are trained on, counts them, and warns."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fsdp2kit.config.schema import ChatDataConfig, TrainConfig, TrainingConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.data.loader import Loader
from fsdp2kit.data.preview import Piece, Preview, build_preview, pieces_of
from tests.data.helpers import templates
from tests.data.helpers.families import ANSWER, MULTI, SINGLE
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import make_tokenizer
from tools.preview import main, print_preview

DEMO = Path(__file__).parents[2] / "toml" / "demo_cp2.toml"


def preview_of(
    folder: Path, rows: list[dict], *, template=templates.MARKED_WIDE, vocab_size=10**6, **options
) -> Preview:
    write_rows(folder / "a.jsonl", rows)
    config = TrainingConfig.model_construct(
        recipe="x",
        data=ChatDataConfig(path=str(folder / "a.jsonl"), **{"seq_len": 64, **options}),
        train=TrainConfig(steps=1, global_batch_size=1),
    )
    tokenizer = make_tokenizer(template)
    data = build_data(config, tokenizer=tokenizer, vocab_size=10**6)
    loader, warnings = data.loader, data.warnings
    assert isinstance(loader, Loader)
    return build_preview(loader, tokenizer=tokenizer, vocab_size=vocab_size, rows=2, title="x", warnings=warnings)


def toml_of(folder: Path, rows: list[dict], data: str, *, recipe: str = "sft") -> tuple[str, Path]:
    """A TOML and its file of rows."""
    make_tokenizer(templates.CHATML).save_pretrained(folder / "tokenizer")
    (folder / "x.toml").write_text(
        f'recipe = "{recipe}"\nmodel.tokenizer = "tokenizer"\nmodel.config.model_type = "llama"\n'
        f'model.weights = "random"\ndata = {{ path = "a.jsonl", {data} }}\n'
        "train = { steps = 1, global_batch_size = 2 }\n"
    )
    return str(folder / "x.toml"), write_rows(folder / "a.jsonl", rows)


def shown_of(toml: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([toml, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_pieces_are_the_document_and_its_mask(tmp_path: Path) -> None:
    found = preview_of(tmp_path, [{"messages": MULTI}] * 2, seq_len=512)
    tokenizer = make_tokenizer(templates.MARKED_WIDE)
    [documents] = found.packs
    assert len(documents) == 2
    for pieces in documents:
        assert "".join(one.text for one in pieces) == tokenizer.apply_chat_template(MULTI, tokenize=False)
        assert "".join(one.text for one in pieces if one.supervised) == f"{ANSWER}<|im_end|>Yes.<|im_end|>"
        specials = [one.text for one in pieces if one.special]
        assert specials == ["<|im_start|>", "<|im_end|>"] * 4
    assert sum(one.tokens for pieces in documents for one in pieces) + found.padding[0] == 512


def test_a_first_token_is_never_learnt() -> None:
    tokenizer = make_tokenizer(None)
    pieces = list(pieces_of(np.array([300, 301, 302]), np.array([True, True, False]), tokenizer))
    assert [(one.tokens, one.supervised) for one in pieces] == [(1, False), (1, True), (1, False)]


def test_counts(tmp_path: Path) -> None:
    question = {"messages": SINGLE[:1]}
    found = preview_of(
        tmp_path, [{"messages": SINGLE}, {"messages": MULTI}, {"messages": SINGLE}, question], seq_len=48
    )
    one = found.statistics[""]
    assert (one.rows, one.documents, one.unsupervised, one.duplicates) == (4, 3, 1, 1)
    assert sum(count for _, _, count in one.histogram) == 3
    assert one.packing_efficiency == pytest.approx(one.tokens / (one.packs_per_epoch * 48))
    assert (found.packs_per_epoch, found.tokens_per_epoch) == (one.packs_per_epoch, one.tokens)
    json.dumps(asdict(found))


WARNINGS = {
    "no end": ({"rows": [{"messages": MULTI}], "seq_len": 20, "overlong": "split"}, "teach no end-of-turn"),
    "bos twice": (
        {"rows": [{"messages": SINGLE}], "template": "{{ bos_token + bos_token }}" + templates.CHATML},
        "BOS token twice",
    ),
    "masked": ({"rows": [{"messages": SINGLE}, {"messages": SINGLE[:1]}]}, "1 rows hold nothing to learn"),
    "vocabulary": ({"rows": [{"messages": SINGLE}], "vocab_size": 30}, "beyond the model's vocabulary of 30"),
    "copies": ({"rows": [{"messages": SINGLE}] * 3}, "2 documents are copies"),
    "long": ({"rows": [{"messages": MULTI}], "seq_len": 50}, "100% of the rows are longer"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_warnings(name: str, tmp_path: Path) -> None:
    options, expected = WARNINGS[name]
    found = preview_of(tmp_path, **options)
    assert any(expected in text for text in found.warnings), found.warnings


def test_good_data_warns_of_nothing(tmp_path: Path) -> None:
    found = preview_of(tmp_path, [{"messages": MULTI}, {"messages": SINGLE}], seq_len=256)
    assert found.warnings == []
    console = Console(file=io.StringIO(), record=True, width=100)
    print_preview(found, console, most_tokens=3)
    text = console.export_text()
    assert "Nothing suspicious" in text
    assert "tokens…]" in text, "long texts are shortened"


def text_of(found: Any, **options: Any) -> str:
    file = io.StringIO()
    print_preview(found, Console(file=file, width=400, **options), most_tokens=80)
    return file.getvalue()


def test_without_colour_marks_stand_around_what_is_learnt(tmp_path: Path) -> None:
    """The answers, each with the token that ends it."""
    answers = [f"{message['content']}<|im_end|>" for message in MULTI if message["role"] == "assistant"]
    found = preview_of(tmp_path, [{"messages": MULTI}], seq_len=256)
    for plain in ({}, {"no_color": True, "force_terminal": True}):
        text = re.sub("\x1b\\[[0-9;]*m", "", text_of(found, **plain))
        assert "«learnt»" in text
        assert "unmarked: read, not learnt" in text
        text = re.sub(r"↵ *│\n│ *", "\n", text)  # a line of the text that the panel has on two lines
        assert re.findall("«(.*?)»", text, re.DOTALL)[1:] == answers
    assert not re.search("[«»]", text_of(found, force_terminal=True, color_system="truecolor"))


def test_marks_are_none_that_the_texts_have(tmp_path: Path) -> None:
    """And a mark stands before the end of a line."""
    found = preview_of(tmp_path, [{"messages": SINGLE}], seq_len=256)
    texts = ["It is «wet»\n", "⟦really⟧", "\nNo\n"]
    pieces = [Piece(text, 2, number != 1, False) for number, text in enumerate(texts)]
    text = text_of(replace(found, packs=[[pieces]], padding=[0]))
    assert "[[learnt]]" in text
    shown = [line.strip("│ \n") for line in text.splitlines() if "│" in line]
    assert shown[1:] == ["[[It is «wet»↵]]", "⟦really⟧[[↵", "No↵]]"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DEMO), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    for text in ("document 1: ", "<|im_start|>user", "steps an epoch", "documents by length"):
        assert text in shown
    assert shown_of(str(DEMO), capsys, "--rows", "1", "data.streaming=true")["statistics"][""]["rows"] == 600
    assert main([str(DEMO), "--html", str(tmp_path / "x.html")]) == 0
    assert main([str(DEMO), "--html", str(tmp_path / "x.html")]) == 0
    (tmp_path / "mine.txt").write_text("notes of mine")
    capsys.readouterr()
    for out, said in (
        ("", "is there, and is no file"),
        ("mine.txt", "is no HTML page"),
        ("no/x", "cannot be written ("),
    ):
        assert main([str(DEMO), "--html", str(tmp_path / out)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "notes of mine"
    page = (tmp_path / "x.html").read_text()
    assert "document 1" in page
    assert "<style>" in page
    capsys.readouterr()
    assert main([str(DEMO), "data.path=/missing.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: data.path: /missing.jsonl: no such file")


def test_lengths_to_choose_from_are_those_of_runs_at_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 10 to 3,000 words: what a run with each seq_len would see."""
    rows = [{"text": "a " * count} for count in (10, 20, 700, 1500, 3000)]
    tokenizer = make_tokenizer(templates.CHATML)
    toml, _ = toml_of(tmp_path, rows, 'format = "text", seq_len = 512, overlong = "error"')
    shown = shown_of(toml, capsys)
    lengths = np.sort([len(tokenizer(row["text"])["input_ids"]) + 1 for row in rows])
    expected = {f"p{at}": int(np.percentile(lengths, at, method="inverted_cdf")) for at in (50, 90, 100)}
    assert expected.items() <= shown["statistics"][""]["row_lengths"].items()
    powers = [1024 << power for power in range(20)]
    longest = next(power for power in powers if power >= lengths.max())
    assert [one["seq_len"] for one in shown["choices"]] == [512, *(power for power in powers if power <= longest)]
    for one in shown["choices"]:
        cut = np.minimum(lengths, one["seq_len"])
        assert one["tokens_lost"] == (lengths - cut).sum()
        assert one["lost_share"] == pytest.approx(1 - cut.sum() / lengths.sum())
        assert one["rows_longer"] == (lengths > one["seq_len"]).sum()
        assert one["packs_per_epoch"] >= cut.sum() / one["seq_len"]
        assert one["packing_efficiency"] == pytest.approx(cut.sum() / one["seq_len"] / one["packs_per_epoch"])
        assert one["steps_per_epoch"] == -(-one["packs_per_epoch"] // 2)
    assert any('data.overlong = "error" refuses them' in text for text in shown["warnings"])
    assert main([toml]) == 0
    text = capsys.readouterr().out
    for words in ("other lengths, in batches of 2", "row length before cutting, p90", "1,024"):
        assert words in text


def test_prompts_outside_the_chat_template_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "Is water wet?", "completion": " Yes."}]
    toml, _ = toml_of(tmp_path, rows, 'format = "prompt_completion"')
    for wrap, is_warned in (("none", True), ("chat", False)):
        warnings = shown_of(toml, capsys, f"data.wrap={wrap}")["warnings"]
        assert any('set data.wrap = "chat"' in text for text in warnings) is is_warned


def test_two_system_messages_in_a_row_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system, no = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "No."}
    twice, once = [system, system, *SINGLE], [system, *MULTI[:2], system, *MULTI[2:]]
    chats = [{"messages": SINGLE}, {"messages": once}, {"messages": twice}, {"messages": json.dumps(twice)}]
    pairs = [{"prompt": [*SINGLE[:1]], "chosen": SINGLE[1:], "rejected": [no]}]
    pairs.append({"prompt": [system, system, *SINGLE[:1]], "chosen": SINGLE[1:], "rejected": [no]})
    cases = [("sft", chats, "false", 3), ("sft", chats, "true", 3), ("dpo", pairs, "false", 2)]
    for recipe, rows, streaming, line in cases:
        toml, path = toml_of(tmp_path, rows, f"streaming = {streaming}", recipe=recipe)
        [found] = [text for text in shown_of(toml, capsys, "data.seq_len=256")["warnings"] if "two system" in text]
        says = f"data.path: 2 of 4 conversations have two system messages in a row, first in {path}:{line}: "
        assert found.startswith(says)


def test_what_the_start_would_say_of_the_run_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["data.seq_len=1024", "train.epochs=1", "lr_schedule.warmup_ratio=none", "lr_schedule.warmup_steps=999"]
    said = "\n".join(shown_of(str(DEMO), capsys, *options)["warnings"])
    assert "data.seq_len 1,024 is beyond the 512 positions" in said
    assert "this would be refused: lr_schedule.warmup_steps: 999, but the whole run has" in said


@pytest.mark.parametrize(("toml", "kind"), [("grpo_demo", "prompts"), ("pretrain_synthetic", "synthetic")])
def test_data_without_documents_is_refused(toml: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{toml}.toml"]) == 2
    assert capsys.readouterr().err == (
        f"error: data.format: '{kind}' has no documents to show; preview data with answers\n"
    )
