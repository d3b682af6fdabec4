"""A recipe of one's own: its section's check, models, identity and memory count as those of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.planner.estimate import estimate, plan_for
from fsdp2kit.run import load
from fsdp2kit.run import main as run_main
from tests.data.helpers import templates
from tests.data.helpers.templates import make_tokenizer
from tests.recipes.helpers import attempt
from tests.support.workers import WorkerPool

RECIPE = '''
from fsdp2kit.config.facts import Needs
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError
from recipes import sft
from recipes.sft import main as main


class CriticConfig(Section):
    """A judge of what is learnt."""

    path: str | None = None
    """The judge."""
    kind: str = "mild"
    """What is judged."""
    gib: int = 0
    """Memory on each rank."""

    def check(self, config, sizes):
        if config.train.micro_batch_size > sizes.dp:
            raise UserError("critic", f"judges {sizes.dp} rows at most", "use smaller micro-batches")

    def models(self):
        return {"critic.path": self.path} if self.path else {}

    def identity(self):
        return {"critic.kind": self.kind}

    def needs(self, config):
        return Needs(beside={"critic": self.gib * 2**30}, savings={"critic.gib": 0} if self.gib else {})

    def offline(self, config, *, model, plan, missing):
        return {"critic.path": None if self.path else f"critic: {self.kind}, for {type(model).__name__}"}


class Config(sft.Config):
    critic: CriticConfig = CriticConfig()
'''


@pytest.fixture
def toml(tmp_path: Path) -> str:
    make_tokenizer(templates.CHATML).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three four"}\n' * 4)
    model = "model_type = 'llama', vocab_size = 1024, hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1"
    path = tmp_path / "x.toml"
    path.write_text(
        f"""recipe = "mine.py"
[run]
dir = "{tmp_path}/run"
[model]
config = {{ {model}, num_attention_heads = 2, num_key_value_heads = 2 }}
weights = "random"
tokenizer = "tokenizer"
[data]
path = "rows.jsonl"
format = "text"
seq_len = 32
[train]
steps = 1
global_batch_size = 2
[wandb]
mode = "disabled"
[critic]
kind = "strict"
"""
    )
    return str(path)


def test_the_check_asks_it(toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*overrides: str) -> str:
        run_main([toml, "--check", *overrides])
        return "".join(capsys.readouterr())

    assert "\ncritic: strict, for LlamaForCausalLM\n" in said()
    assert "critic.path unchecked: not on this machine" in said("critic.path=some/model")
    assert said("train.micro_batch_size=2").startswith("error: critic: judges 1 rows at most; use smaller")
    rows = f"{tmp_path}/rows.jsonl"
    assert said(f"critic.path={rows}") == f"error: critic.path: {rows} is a data file; set data.path to it\n"


def test_its_memory_is_planned(toml: str) -> None:
    def planned(*overrides: str) -> dict[str, int]:
        _, config = load(toml, overrides)
        return dict(estimate(config, *plan_for(config, world_size=1, local_world_size=1)).peak.bytes)

    plain, with_critic = planned(), planned("critic.gib=3")
    assert with_critic == {**plain, "critic": 3 * 2**30}
    with pytest.raises(UserError, match=r"the memory of critic\.path, a model beside the trained one, is not planned"):
        planned("critic.path=some/model")


def test_another_one_is_another_run(toml: str, tmp_path: Path, pool: WorkerPool) -> None:
    def start(*overrides: str) -> tuple[int, str, str]:
        return pool.run(1, attempt, [toml, *overrides], str(tmp_path))[0]

    assert start()[0] == 0
    code, _, said = start("train.steps=2", "critic.kind=mild")
    assert code == 2
    assert "was made with critic.kind = 'strict', and this run has critic.kind = 'mild'; undo that" in said
    assert start("train.steps=2")[0] == 0


@pytest.mark.parametrize("outer", ["run.RunConfig", "eval.EvalConfig", "data.TextDataConfig", "wandb.WandbConfig"])
def test_a_section_inside_ours_is_checked(
    outer: str, toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, kind = outer.split(".")
    recipe = f"""
from fsdp2kit.config.section import Section
from fsdp2kit.config.sections.{name} import {kind}
from fsdp2kit.errors import UserError
from recipes import sft
from recipes.sft import main as main


class Inner(Section):
    a: int = 0

    def check(self, config, sizes):
        raise UserError("{name}.inner.a", "is wrong", "mend it")


class Outer({kind}):
    inner: Inner = Inner()


class Config(sft.Config):
    {name}: Outer = Outer()
"""
    (tmp_path / "mine.py").write_text(recipe)
    text = Path(toml).read_text()
    Path(toml).write_text(text[: text.index("[critic]")])
    assert run_main([toml, "--check"]) == 2
    assert f"error: {name}.inner.a: is wrong" in capsys.readouterr().err
