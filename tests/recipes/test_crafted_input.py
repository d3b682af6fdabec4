"""Files of models, templates and TOMLs as others may have written them: a byte-order mark is read, deep nesting is
refused in a line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fsdp2kit.config.load import parse_override, read_toml
from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.assets import generation_config
from fsdp2kit.model.build import model_on_meta
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.run import main as run_main
from tests.recipes.helpers import toml_for
from tests.recipes.test_bad_input import model_dir
from tests.support.models import DEMO
from tools import launch, preview

__all__ = ["model_dir"]  # a fixture

DEEP = "[" * 20_000 + "]" * 20_000
BOM = "\ufeff"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def test_a_byte_order_mark_is_read(model_dir: Path, tmp_path: Path) -> None:
    path = toml_for(model_dir, tmp_path)
    plain = read_toml(path)
    path.write_text(BOM + path.read_text())
    assert read_toml(path) == plain
    (tmp_path / "t.jinja").write_text(BOM + TEMPLATE)
    section = ModelConfig(path=str(model_dir), chat_template=str(tmp_path / "t.jinja"))
    assert build_tokenizer(section).chat_template == TEMPLATE
    shutil.copytree(DEMO / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(BOM + TEMPLATE)
    assert build_tokenizer(ModelConfig(tokenizer=str(tmp_path / "tokenizer"))).chat_template == TEMPLATE


def test_a_toml_that_is_none_is_still_explained(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(BOM + "[run]\ndir: a\n")
    with pytest.raises(UserError, match=r'not valid TOML.*write dir = "a": this looks like YAML'):
        read_toml(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_bytes("[run]\n".encode("utf-16"))
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(tmp_path / "x.toml")


def test_deep_nesting_is_refused_in_a_line(model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    config = load_hf_config(ModelConfig(path=str(model)))
    for name in ("config.json", "generation_config.json"):
        (model / name).write_text(DEEP)
    with pytest.raises(UserError, match=r"config\.json is nested too deep"):
        load_hf_config(ModelConfig(path=str(model)))
    with pytest.raises(UserError, match=r"config\.json: cannot be read .it is nested too deep"):
        model_on_meta(model)
    with pytest.raises(UserError, match=r"generation_config\.json: is not a generation config"):
        generation_config(config, tokenizer=None, source=model)
    (tmp_path / "x.toml").write_text(f"a = {DEEP}")
    with pytest.raises(UserError, match="nested too deep"):
        read_toml(tmp_path / "x.toml")
    with pytest.raises(UserError, match=r"override a\.b: its value is nested too deep"):
        parse_override(f"a.b={DEEP}")


LISTS = "{{ " + "[" * 5000 + "]" * 5000 + " }}"
LOOPS = "{% for a in [1] %}" * 30 + "{% endfor %}" * 30
CALLS = "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"


@pytest.mark.parametrize(
    ("template", "what"),
    [(LISTS, "does not end (it calls itself, or"), (LOOPS, "cannot be run ("), (CALLS, "does not end (it calls")],
    ids=["lists", "loops", "calls"],
)
def test_a_template_that_cannot_be_run_is_refused_in_a_line(
    model_dir: Path, tmp_path: Path, template: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    options = ["mesh.cp=1", f"model.chat_template={tmp_path / 't.jinja'}"]
    assert preview.main([str(toml_for(model_dir, tmp_path)), *options]) == 2
    # Python 3.12 writes this itself where the stack ends within an audit hook, which filelock has.
    printed = capsys.readouterr().err.replace("Exception ignored in audit hook", "")
    [line] = printed.splitlines()
    assert line.startswith("error: ")
    assert f": the chat template {what}" in line


def test_a_preview_shows_control_characters(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b]0;evil\x07 \x1b[2J \x9b31m \u202e token=abcdefgh12345678"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "ok\r\x08"}]
    rows = tmp_path / "rows\x1b[31m.jsonl"
    rows.write_text(json.dumps({"messages": messages}))
    options = [str(toml_for(model_dir, tmp_path)), "mesh.cp=1", f"data.path={rows}", "data.format=chat"]
    for more in ([], ["--json"]):
        assert preview.main([*options, *more]) == 0
        out = capsys.readouterr().out
        assert not set(out) & {"\x1b", "\x07", "\x9b", "\r", "\x08", "\u202e"}
        assert "token=abcdefgh12345678" in out  # data are shown as they are
    assert preview.main(options) == 0
    out = capsys.readouterr().out
    assert "a\\x1b]0;evil\\x07 \\x1b[2J \\x9b31m \\u202e" in out
    assert "ok\\x0d\\x08" in out


def test_errors_show_control_characters_and_no_secrets(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(toml_for(model_dir, tmp_path))
    assert run_main([path, "--check", "data.path=no\x1b[2J.jsonl"]) == 2
    assert "no\\x1b[2J.jsonl" in capsys.readouterr().err
    assert run_main([path, "--check", "data.format=https://me:pa55w0rd@host/x"]) == 2
    said = capsys.readouterr().err
    assert "https://***@host/x" in said
    assert "pa55w0rd" not in said


def test_a_launch_file_keeps_no_secret(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml_for(model_dir, tmp_path)
    arguments = ["slurm", str(path), "--nodes", "1", "--gpus-per-node", "1", "checkpoint.dir=s3://a:b@c/d"]
    assert launch.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: checkpoint.dir: holds a secret, which a launch file would keep")
