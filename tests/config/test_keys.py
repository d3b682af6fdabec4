"""`fsdp2kit keys`: every key of the config classes, found by section, by name and by words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2kit.config.keys import NOT_SET, REQUIRED, Reference, read_keys
from fsdp2kit.config.load import known_keys
from fsdp2kit.files.local import bundled_folder
from fsdp2kit.run import load_recipe
from tools import keys as tool

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return read_keys(tool._schemas(None))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_keys_are_those_of_the_config_class(recipe: str, reference: Reference) -> None:
    """`known_keys` reads the pydantic classes, and is what a TOML is checked against."""
    known = set(known_keys(load_recipe(bundled_folder("recipes") / f"{recipe}.py").Config))
    listed = {key.name for key in reference.keys if recipe in key.recipes}
    as_known = {".".join("*" if part in ("N", "NAME") else part for part in name.split(".")) for name in listed}
    sections = {name for name in known if "." not in name} - {"recipe"}
    entries = {name for name in known if name.endswith(".*")}  # names and numbers of the user's, which are no keys
    assert as_known == known - sections - entries
    for key in reference.keys:
        assert key.type, key.name
        assert key.doc, key.name


def test_defaults_are_what_a_config_without_that_key_has(reference: Reference) -> None:
    dump = load_recipe(bundled_folder("recipes") / "sft.py").Config(recipe="sft").model_dump(mode="json")
    compared = 0
    for key in reference.keys:
        section, _, name = key.name.partition(".")
        values = dump.get(section) if name else None
        if values is not None and "sft" in key.recipes and not key.variant and name in values:
            value = values[name]
            assert key.default == (NOT_SET if value is None else json.dumps(value)), key.name
            compared += 1
    assert compared > 90


def test_a_key_of_one_variant_says_which(reference: Reference) -> None:
    [momentum] = reference.find("optimizer.muon_momentum")
    assert momentum.variant == 'name = "muon"'
    [name] = reference.find("optimizer.name")
    assert name.choices == ('"adamw"', '"adamw_bf16"', '"adamw_8bit"', '"muon"')
    assert name.default == '"adamw"'
    [lr] = reference.find("optimizer.lr")  # all variants have it alike
    assert not lr.variant
    loss = reference.find("dpo.loss")
    assert [one.recipes for one in loss] == [("dpo",)]


def test_names_with_numbers_and_names_of_the_users(reference: Reference) -> None:
    [weight] = reference.find("reward.0.weight")
    assert weight.name == "reward.N.weight"
    [function] = reference.find("reward.3.function")
    assert function.default == REQUIRED
    assert reference.find("[eval]")[0].name == "eval.every"
    assert [key.name for key in reference.find("eval.sets.code.path")] == ["eval.sets.NAME.path"]
    assert not reference.find("eval.set")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("held-out data", "eval.path"),
        ("learning rate", "optimizer.lr"),
        ("micro batch", "train.micro_batch_size"),
        ("per_device_train_batch_size", "train.micro_batch_size"),  # TRL's name
        ("gradient clipping", "train.max_grad_norm"),
        ("lora rank", "lora.rank"),
        ("sequence parallel attention method", "context_parallel.method"),
        ("seq_len", "data.seq_len"),
        ("resume", "run.resume"),
        ("bf16", "fsdp.param_dtype"),
        ("stop early", "eval.patience"),
        ("how long", "train.steps"),
        ("mixed precision", "fsdp.param_dtype"),
    ],
)
def test_a_search_puts_what_is_meant_first(words: str, name: str, reference: Reference) -> None:
    assert reference.search(words.split())[0].name == name


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = tool.main(list(arguments))
    return code, *capsys.readouterr()


def test_sections_keys_and_one_key_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert any(line.startswith("[grpo]") and line.endswith("(recipe grpo)") for line in out.splitlines())
    assert "data-parallel" not in out
    code, out, _ = run(capsys, "train")
    assert [line.split()[0] for line in out.splitlines()][:2] == ["train.steps", "train.epochs"]
    assert run(capsys, "[train]")[1] == run(capsys, "TRAIN")[1] == out
    _, out, _ = run(capsys, "fsdp.offload")
    assert '"none" | "params" | "optimizer"' in out
    assert 'default: "none"' in out
    _, out, _ = run(capsys, "data.format")
    assert 'data.format (recipe grpo)\n  type: "prompts"' in out
    assert "\x1b" not in out


def test_one_recipe_has_its_own_sections_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "[dpo]" not in run(capsys, "--recipe", "grpo")[1]
    text = "from fsdp2kit.config.schema import Section, TrainingConfig\n"
    text += "class Mine(Section):\n    dose: float = 0.5\n    '''How much of it.'''\n"
    text += "class Config(TrainingConfig):\n    mine: Mine = Mine()\ndef main(config): ...\n"
    own = tmp_path / "own.py"
    own.write_text(text, encoding="utf-8")
    code, out, _ = run(capsys, "mine", "--recipe", str(own))
    assert (code, out.split()) == (0, ["mine.dose", "0.5", "How", "much", "of", "it"])
    code, _, err = run(capsys, "--recipe", "gpro")
    assert (code, err) == (2, "error: --recipe: there is no recipe 'gpro'; did you mean grpo?\n")


def test_what_is_not_found_is_one_line_with_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "fsdp.stratgy")
    assert (code, out) == (2, "")
    assert err.startswith("error: keys: there is no 'fsdp.stratgy'; did you mean fsdp.strategy")
    assert run(capsys, "xyzzy")[0] == 2


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str], reference: Reference) -> None:
    assert len(json.loads(run(capsys, "--json")[1])) == len(reference.keys)
    [found] = json.loads(run(capsys, "train.steps", "--json")[1])
    assert found["key"] == "train.steps"
    assert (found["default"], found["required"], found["type"]) == (None, False, "integer ≥ 0")


def test_it_waits_for_neither_torch_nor_pydantic() -> None:
    text = "import sys; from fsdp2kit.__main__ import main; sys.argv[1:] = ['keys', 'fsdp']\n"
    text += "try: main()\nexcept SystemExit: pass\nprint(*{'torch', 'pydantic'} & set(sys.modules), 'end')"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout.splitlines()[-1].split() == ["end"]
