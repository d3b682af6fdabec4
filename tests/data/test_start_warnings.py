"""Whatever the preview warns of, a run's start and `check` say too, in every format that has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from fsdp2kit.config.data_checks import check_data
from fsdp2kit.config.schema import ChatDataConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.data.checks import count_steps
from fsdp2kit.data.documents import build_documents
from fsdp2kit.data.findings import Findings
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.run import load
from tests.data.helpers import templates
from tests.data.helpers.families import MULTI, SINGLE
from tests.data.helpers.files import write_rows
from tests.data.helpers.templates import make_tokenizer
from tools.preview import main

SYSTEM = {"role": "system", "content": "Be brief."}
NO_END = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
NO_END += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
TWICE = "{{ bos_token + bos_token }}" + templates.CHATML
PAIR = {"prompt": "Is water wet?", "completion": " Yes."}
ANSWERS = {"prompt": "Is water wet?", "chosen": " Yes.", "rejected": " No."}
BEGUN = {"text": "<|begin|>Is water wet?<|im_end|>", "id": 7, "url": "a"}
CASES = {
    "no stop token": ("chat", [{"messages": SINGLE}], None, ["1 of 1 documents teach no end-of-turn"]),
    "no stop token in pairs": (
        'prompt_completion", wrap = "chat',
        [{"prompt": "a", "completion": "b"}],
        None,
        ["teach no end-of-turn"],
    ),
    "alpaca": ("alpaca", [{"instruction": "a", "output": "b"}], None, ["teach no end-of-turn"]),
    "quotes": (
        "chat",
        [{"messages": SINGLE}, {"messages": [SINGLE[0], {"role": "assistant", "content": "<|im_end|> </s>"}]}],
        templates.CHATML,
        [
            "1 conversation quotes special tokens of the chat template, first in FILE:2: they are read as text",
            "special tokens in conversations, which the chat template does not write: </s>",
        ],
    ),
    "no eos": ("text", [{"text": "Water."}], None, ["teach no end-of-turn or end-of-text token"]),
    "no eos in tokens": ("tokens", [{"input_ids": [50, 51, 52]}], templates.CHATML, ["teach no end-of-turn"]),
    "bos twice": ("chat", [{"messages": SINGLE}], TWICE, ["1 of 1 documents begin with the BOS token twice"]),
    "bos twice in tokens": ("tokens", [{"input_ids": [0, 0, 52, 3]}], templates.CHATML, ["BOS token twice"]),
    "own bos": (
        "text",
        [BEGUN, {"text": "Water."}],
        templates.CHATML,
        ["data.path: the BOS token begins 1 text", "data.path: columns not read: id, url"],
    ),
    "unwrapped": ("prompt_completion", [PAIR], templates.CHATML, ["outside the tokenizer's chat template"]),
    "unwrapped pairs": ("preference", [ANSWERS], templates.CHATML, ["outside the tokenizer's chat template"]),
    "two systems": (
        "chat",
        [{"messages": MULTI}, {"messages": [SYSTEM, SYSTEM, *SINGLE]}],
        templates.CHATML,
        ["1 of 2 conversations have two system messages in a row, first in FILE:2"],
    ),
    "two systems and no rows": (
        "chat",
        [{"messages": SINGLE, "id": 1}, {"messages": SINGLE[:1], "note": "x"}, {"messages": SINGLE}],
        templates.CHATML,
        ["1 rows hold nothing to learn", "1 documents are copies of earlier ones", "columns not read: id, note"],
    ),
    "little": (
        "tokens",
        [{"input_ids": [*range(20, 70), 3], "loss_mask": [0] * 50 + [1]}],
        templates.CHATML,
        ["only 2.0% of the tokens are learnt"],
    ),
}


def toml_of(folder: Path, name: str, *, streaming: bool = False) -> tuple[str, list[str]]:
    kind, rows, template, expected = CASES[name]
    # Answers that end in no special token end in the EOS, if there is one.
    tokenizer = make_tokenizer(NO_END if template is None else template)
    if template is None:
        tokenizer.eos_token = None  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save_pretrained(folder / "tokenizer")
    recipe = "dpo" if kind == "preference" else "sft"
    (folder / "x.toml").write_text(
        f'recipe = "{recipe}"\nmodel.tokenizer = "tokenizer"\nmodel.config.model_type = "llama"\n'
        f'model.weights = "random"\ndata = {{ path = "a.jsonl", seq_len = 256, format = "{kind}", '
        f"streaming = {str(streaming).lower()} }}\ntrain = {{ steps = 1, global_batch_size = 2 }}\n"
    )
    path = write_rows(folder / "a.jsonl", rows)
    return str(folder / "x.toml"), [text.replace("FILE", str(path)) for text in expected]


def said_by_a_run(toml: str) -> list[str]:
    _, config = load(Path(toml), [f"run.dir={Path(toml).parent / 'run'}"])
    check_data(config)
    data = build_data(config, tokenizer=build_tokenizer(config.model), vocab_size=10**6)
    return data.describe()


def shown(toml: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([toml, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CASES)
def test_a_start_says_what_the_preview_warns_of(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, expected = toml_of(tmp_path, name)
    first, again = said_by_a_run(toml), said_by_a_run(toml)  # the second time, tokens come from the cache
    assert first == again
    preview = shown(toml, capsys)
    assert [text for text in preview["warnings"] if f"warning: {text}" not in first] == []
    assert [text for text in preview["notes"] if text not in first] == []
    assert sum(line.startswith("warning: ") for line in first) == len(preview["warnings"])
    for text in expected:
        assert any(text in line for line in first), first
        assert any(text in line for line in [*preview["warnings"], *preview["notes"]])


@pytest.mark.parametrize("name", ["no stop token", "no eos", "own bos", "unwrapped", "two systems"])
def test_a_stream_says_it_of_its_first_rows(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, expected = toml_of(tmp_path, name, streaming=True)
    _, config = load(Path(toml), [f"run.dir={tmp_path / 'run'}"])
    preview, checked = shown(toml, capsys), count_steps(config)
    for text in expected:
        assert any(text in line for line in said_by_a_run(toml))
        assert any(text in line for line in [*preview["warnings"], *preview["notes"]])
        assert any(text in line for line in checked), checked


def test_what_is_noticed_is_of_all_rows_in_their_order(tmp_path: Path) -> None:
    """Also where workers encode them; with tokens whose findings are lost, nothing is said."""
    tokenizer = make_tokenizer(templates.CHATML)
    rows = [{"messages": SINGLE} for _ in range(600)]
    for at in (301, 500):
        rows[at] = {"messages": [SYSTEM, SYSTEM, *SINGLE]}
    for workers in (0, 2):
        path = write_rows(tmp_path / f"{workers}.jsonl", [{"messages": SINGLE}] * workers + rows)
        section = ChatDataConfig(path=str(path), workers=workers)
        [found] = build_documents(section, tokenizer=tokenizer).warnings
        count = f"2 of {600 + workers} conversations have two system messages in a row"
        assert found.startswith(f"data.path: {count}, first in {path}:{302 + workers}: ")
    for file in Path(datasets.config.HF_DATASETS_CACHE).rglob("*.json"):
        file.unlink()
    assert build_documents(section, tokenizer=tokenizer).warnings == ()


@pytest.mark.parametrize("cut", range(5))
def test_what_is_noticed_of_blocks_is_what_is_noticed_of_all_rows(cut: int) -> None:
    def noted(rows: Sequence[int]) -> Findings:
        found = Findings(unwrapped=3 in rows)
        for row in rows:
            found.note_row(unread=["id", f"column {row // 2}"], systems_twice=[row > 0, False])
            found.note_affixes(has_bos=row > 1, has_eos=row > 2)
            found.note_special(f"row {row}", ["<a>", f"<{row}>"], quotes=row in (1, 2))
        return found

    found = noted(range(cut))
    found.add(noted(range(cut, 4)))
    assert found == noted(range(4))
    assert found.first_systems_twice == 1
    assert found.first_quoting == "row 1"
    assert Findings.from_json(found.to_json()) == found
