"""Templates that do not end are stopped, and the row is named; those that end render as in transformers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp2kit.data import bounds
from fsdp2kit.data.fitting import fit
from fsdp2kit.data.template import Template
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.families import FAMILIES, MULTI, TOOL, talk_for, tokenizer_of
from tests.data.helpers.templates import encode_chat, make_tokenizer

LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": (LOOPS + ENDS, "rounds"),
    "loops under markers": (LOOPS + "{% generation %}x{% endgeneration %}" + ENDS, "rounds"),
    "slow loops": (LOOPS + "{% set x = range(100000) | list | length %}" + ENDS, "takes more than"),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "rounds",
    ),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "a text that is printed": (LOOPS + "{{ messages[0].content }}" + ENDS, "letters"),
    "a text of its own": (LOOPS + "x" * 10_000 + ENDS, "letters"),
    "a text that is doubled": (
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "letters",
    ),
    "a text that is joined": (
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "letters",
    ),
    "a text that is multiplied": ("{{ 'x' * 10 ** 12 }}", "letters"),
    "a number": ("{{ 10 ** (10 ** 12) }}", "letters"),
}


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bounds, reached sooner."""
    monkeypatch.setattr(bounds, "ROUNDS", 20_000)
    monkeypatch.setattr(bounds, "LETTERS", 1_000_000)
    monkeypatch.setattr(bounds, "SECONDS", 0.5)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_stopped_in_a_thread(name: str) -> None:
    source, what = ENDLESS[name]
    talk = [{"role": "user", "content": "Is water wet? " * 100}, {"role": "assistant", "content": "Yes."}]
    tokenizer = make_tokenizer(source + templates.CHATML)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(encode_chat, talk, tokenizer, where="chat.jsonl:7")
        with pytest.raises(
            UserError, match=rf"^chat.jsonl:7: the chat template does not end \(.*{what}.*\); set model"
        ):
            asked.result(timeout=60)


@pytest.mark.full
def test_the_bounds_are_reached_within_ten_seconds() -> None:
    start = time.thread_time()
    with pytest.raises(UserError, match="does not end"):
        encode_chat(MULTI, make_tokenizer(LOOPS + ENDS + templates.CHATML))
    assert time.thread_time() - start < 10


def test_a_long_conversation_under_two_nested_loops_ends() -> None:
    source = templates.CHATML + "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}"
    talk = [{"role": role, "content": "Is water wet?"} for _ in range(400) for role in ("user", "assistant")]
    tokenizer = make_tokenizer(source)
    text = Template(tokenizer, tools=None, variables={}, where="x").render(talk)
    assert text == tokenizer.apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.talk])
def test_the_counts_change_no_text(name: str, marked: bool) -> None:
    tokenizer = tokenizer_of(name, marked=marked)
    template = Template(tokenizer, tools=[TOOL], variables={}, where="x")
    talk, text = fit(template, talk_for(name), (), prompt=False)
    names: Any = tokenizer.special_tokens_map
    texts, _ = render_jinja_template([talk], tools=[TOOL], chat_template=str(tokenizer.chat_template), **names)
    assert text == texts[0]


OPERATORS = """\
{%- macro twice(text, times=2) %}{{ text * times }}{{ caller() if caller else '' }}{% endmacro -%}
{%- set n = namespace(all='', list=[]) -%}
{%- for m in messages if m.role != 'system' recursive -%}
    {%- set n.all = n.all + m.content ~ loop.index -%}
    {%- if loop.index == 2 %}{% continue %}{% endif -%}
    {{ twice(m.content) }}{% call twice('-', times=3) %}<{{ m.role ~ missing }}>{% endcall %}
  {%- else -%}
    nothing
  {%- endfor %}
{{ n.all }}{{ [1] + [2] }}{{ 3 * 4 + 2 ** 5 }}{{ none ~ 1.5 }}{{ missing }}{% generation %}{% set x = 1 %}{{ x }}
{% endgeneration %}{{ x is defined }}
"""


def test_operators_macros_and_loops_render_as_in_transformers() -> None:
    tokenizer = make_tokenizer(OPERATORS)
    text = Template(tokenizer, tools=None, variables={}, where="x").render(MULTI)
    assert text == tokenizer.apply_chat_template(MULTI, tokenize=False)


@pytest.mark.parametrize("path", sorted(Path("fsdp2kit/templates").glob("*.jinja")), ids=lambda path: path.stem)
def test_our_own_templates_render_as_in_transformers(path: Path) -> None:
    tokenizer = make_tokenizer(path.read_text(encoding="utf-8"))
    text = Template(tokenizer, tools=None, variables={}, where="x").render(MULTI)
    assert text == tokenizer.apply_chat_template(MULTI, tokenize=False)


@pytest.mark.parametrize(
    ("operator", "one", "other", "fits"),
    [
        ("*", "abc", 3, True),
        ("*", "abc", 4, False),
        ("*", 4, "abc", False),
        ("*", [1, 2], 6, False),
        ("*", 6, (1, 2), False),
        ("*", 600, 700, True),
        ("*", 1.5, 2, True),
        ("**", 4, 3, True),
        ("**", 4, 4, False),
        ("**", 2.0, 600, True),
    ],
)
def test_a_product_that_is_too_long_is_refused(
    operator: str, one: Any, other: Any, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "LETTERS", 10)
    function = bounds.multiplied if operator == "*" else bounds.raised
    with nullcontext() if fits else pytest.raises(bounds.Unbounded, match="more than 10 letters"):
        assert function(one, other) == (one * other if operator == "*" else one**other)
