"""The rewards in common use, against tables by hand and the libraries themselves, and in their real processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2kit.config.section import OverrideText
from fsdp2kit.config.sections.reward import RewardConfig
from fsdp2kit.data.code import code_digests
from fsdp2kit.data.contents import changes
from fsdp2kit.errors import UserError
from fsdp2kit.rl import common_rewards
from fsdp2kit.rl.common_rewards import exact_answer, matches_pattern, matches_schema, math_answer, overlong_penalty
from fsdp2kit.rl.rewards.rewards import Rewards
from fsdp2kit.run import main as run_main

MODULE = "fsdp2kit.rl.common_rewards"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        # What is marked as the answer.
        (r"So \boxed{42}.", "42", 1),
        (r"First \boxed{1}, no: \boxed{2}", "2", 1),
        (r"First \boxed{1}, no: \boxed{2", "1", 1),
        (r"\boxed{\boxed{5}}", "5", 1),
        (r"\boxed{\text{the set } \{1, \{2\}\}}", r"\boxed{the set \{1, \{2\}\}}", 1),
        (r"\boxed{7} and 8 of 9", "7", 1),
        (r"\boxed{} or 8", "8", 0),
        ("3 + 4 = 7\n#### 7\nor 8", "7", 1),
        ("#### Step 4\nso it is 12.", "12", 1),
        ("#### $18 per day", "18", 1),
        ("x = 5, hence y = 6.", "6", 1),
        ("6, hence y = 5", "6", 0),
        ("nothing", "6", 0),
        ("", "6", 0),
        # The row's answer is read in the same way.
        ("#### 72", "She has 70 + 2 = 72 clips.\n#### 72", 1),
        ("It is 0.5", r"\boxed{\frac{1}{2}}", 1),
        ("It is 3", 3, 1),
        ("It is 0.1", 0.1, 1),
        # Forms of a number.
        ("1,234,567.50", "1234567.5", 1),
        ("1{,}234", "1234", 1),
        (r"1\,234", "1234", 1),
        ("1\u202f234", "1234", 1),
        ("12,34", "1234", 0),
        ("-5", "5", 0),
        ("−5", "-5", 1),
        ("-$5.00", "-5", 1),
        ("$-5$", "-5", 1),
        ("8 - 3 = +5", "5", 1),
        ("pages 3-5", "5", 1),
        (".5", "1/2", 1),
        ("3 / 4", "0.75", 1),
        (r"$-\dfrac{3}{4}$", "-3/4", 1),
        (r"\boxed{\frac12}", "0.5", 1),
        (r"\boxed{1\frac{1}{2}}", "3/2", 1),
        ("0.333333333333", "1/3", 0),
        ("0.1000000000000000000001", "0.1", 0),
        ("2.5e-3", "0.0025", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{5\text{ cm}^2}", "5", 1),
        (r"\boxed{\$3.50}", "3.5", 1),
        (r"\boxed{x = 5}", "5", 1),
        # A percentage is its number, or ÷ 100 beside a plain number.
        (r"\boxed{50\%}", "50", 1),
        ("50%", "0.5", 1),
        ("0.5", "50%", 1),
        ("50%", "0.5%", 0),
        ("50 %", "50%", 1),
        # No number at all.
        (r"\boxed{2x}", "2", 0),
        (r"\boxed{2\pi}", "2", 0),
        (r"\boxed{\sqrt{2}}", "2", 0),
        (r"\boxed{x/2}", "2", 0),
        (r"\boxed{3, 5}", "5", 0),
        ("1/0", "1", 0),
        ("9" * 5000, "9", 0),
        ("\\boxed{" * 3000 + "5", "5", 1),
        # Texts.
        (r"\boxed{\text{Paris}}", "paris", 1),
        ("  Paris. ", "Paris", 1),
        ("It is Paris", "Paris", 0),
        ("#### New   York", "new york", 1),
        ("(2, 3)", "(2, 3)", 1),
    ],
)
def test_exact_answers(completion: str, answer: Any, reward: float) -> None:
    assert exact_answer([completion, said(completion)], [answer, answer]) == [reward, reward]


DIGITS = st.decimals(-(10**12), 10**12, allow_nan=False, allow_infinity=False, places=4)
FORMS = ["{:f}", "{:,f}", "${:,f}$", "#### {:,f}", r"\boxed{{{:f}}}", r"so $\boxed{{\text{{{:,f}}}}}$.", "≈ {:f} kg"]


@settings(max_examples=300, deadline=None)
@given(DIGITS, st.sampled_from(FORMS), st.sampled_from(["", "1 of 2.5: ", "-3/4, "]))
def test_a_number_is_read_as_it_was_written(value: Decimal, form: str, before: str) -> None:
    [right, wrong] = exact_answer([f"{before}\n{form.format(value)}"] * 2, [f"{value:f}", f"{value + 1:f}"])
    assert (right, wrong) == (1, 0)


@settings(max_examples=200, deadline=None)
@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 9))
def test_a_fraction_is_equal_in_any_terms(above: int, below: int, by: int) -> None:
    value = Fraction(above, below)
    written = [f"{above * by}/{below * by}", rf"\boxed{{\frac{{{above * by}}}{{{below * by}}}}}", f"{above} / {below}"]
    assert exact_answer(written, [f"{value.numerator}/{value.denominator}"] * 3) == [1, 1, 1]
    other = value + Fraction(1, 10**6)
    assert exact_answer(written, [f"{other.numerator}/{other.denominator}"] * 3) == [0, 0, 0]


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("0123456789.,/%$-+{}\\boxed#\n e^()")), st.text(max_size=9))
def test_no_text_is_a_fault(completion: str, answer: str) -> None:
    assert set(exact_answer([completion, answer], [answer, completion])) <= {0, 1}
    assert exact_answer([completion], [None]) == [None]


@pytest.mark.parametrize(
    "part", [" ", "1,", "1 ", "9", "{", r"\frac{", r"\boxed{", "1/", "#", "#### ", "- ", r"\frac1"]
)
@pytest.mark.parametrize("start", ["", r"\frac{", r"\boxed{1", "x =", "#### 1 "])
def test_no_text_takes_long(start: str, part: str) -> None:
    started = time.monotonic()
    exact_answer([start + part * 20_000], ["5"])
    assert time.monotonic() - started < 2


def test_the_last_message_of_the_assistant_counts() -> None:
    turns = [*said("41"), {"role": "tool", "content": "7"}, *said("It is 42"), {"role": "user", "content": "13"}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}]
    calls = [{"role": "assistant", "content": None, "tool_calls": []}]
    assert exact_answer([turns, parts, calls, [], [{"role": "tool", "content": "42"}]], ["42"] * 5) == [1, 1, 0, 0, 0]


MATH = [  # a completion, an answer, and whether they are equal
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1),
    (r"so $(x+1)^2$", r"$x^2+2x+1$", 1),
    (r"so $x^2+1$, but \boxed{x^2}", "x^2", 1),
    (r"\boxed{(1, 2)}", "(1,2)", 1),
    (r"\boxed{\{3, 1\}}", r"\{1, 3\}", 1),
    (r"\boxed{1\frac{1}{2}}", r"1\frac{1}{2}", 1),
    ("The answer is 42.", "42", 1),
    ("The answer is 42.", "He has 42.\n#### 42", 1),
    (r"\boxed{\sqrt{2}}", "2", 0),
    ("no idea", "2", 0),
    ("", "2", 0),
]


def test_math_answers_are_those_of_math_verify() -> None:
    math_verify = pytest.importorskip("math_verify")
    completions, answers, expected = ([*column] for column in zip(*MATH, strict=True))
    assert math_answer(completions, answers) == expected
    for completion, answer, reward in MATH:
        if "$" not in answer and "#" not in answer and completion:
            verified = math_verify.verify(math_verify.parse(f"${answer}$"), math_verify.parse(completion))
            assert verified == bool(reward), (completion, answer)
    assert math_answer(["1", "1"], [None, ""]) == [None, None]


def test_what_math_verify_cannot_do_in_time_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    math_verify = pytest.importorskip("math_verify")
    assert math_answer([r"\boxed{5}"], ["5"]) == [1]  # imports at a first answer take longer than a second
    started = time.monotonic()
    assert math_answer([r"\boxed{9^{9^{9^{9}}}}", r"\boxed{5}"], ["5", "5"], seconds=1) == [0, 1]
    assert time.monotonic() - started < 15

    def never(text: str, **_: Any) -> list[Any]:
        raise math_verify.errors.TimeoutException("Operation timed out!")

    monkeypatch.setattr(math_verify, "parse", never)
    assert math_answer(["5"], ["5"]) == [None]


def test_patterns_match_whole_completions() -> None:
    pattern = r"<think>.*</think>\s*<answer>[^<]+</answer>"
    good = "<think>a\nb</think>\n<answer>4</answer>"
    assert matches_pattern([good, said(good), good + "\n", "so " + good, ""], pattern=pattern) == [1, 1, 0, 0, 0]
    assert matches_pattern(["YES", "no"], pattern="(?i)yes") == [1, 0]


def test_lengths_are_punished_as_in_the_paper() -> None:
    lengths = [0, 79, 80, 81, 90, 99, 100, 101, 500]
    found = overlong_penalty([[0] * one for one in lengths], limit=100, buffer=20)
    assert found == [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1]
    other = pytest.importorskip("trl.rewards.other_rewards").get_soft_overlong_punishment(100, 20)
    assert found == other(completion_ids=[[0] * one for one in lengths])


@settings(max_examples=100, deadline=None)
@given(
    st.none() | st.integers(-3, 3) | st.dictionaries(st.just("age"), st.none() | st.booleans() | st.integers(-3, 3))
)
def test_schemas_are_those_of_jsonschema(value: Any) -> None:
    import jsonschema

    try:
        jsonschema.validate(value, SCHEMA)
        expected = 1
    except jsonschema.ValidationError:
        expected = 0
    text = json.dumps(value, indent=1)
    written = [text, f"Here:\n```json\n{text}\n```\nBye", f"```json\n5\n```\n```json\n{text}\n```"]
    assert matches_schema(written, schema=SCHEMA) == [expected] * 3


def test_what_is_no_json(tmp_path: Path) -> None:
    broken = ["", "age: 3", "{'age': 3}", '{"age": 3', '{"age": NaN}', "[" * 10**5, '```\n{"age": 3}\n```', "9" * 5000]
    assert matches_schema([*broken, ' {"age": 3} '], schema=SCHEMA) == [0] * len(broken) + [1]
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert matches_schema(['{"age": 3}', '{"age": -3}'], schema_file=str(path)) == [1, 0]


def rewards_of(*tables: dict[str, Any], columns: tuple[str, ...] = ()) -> Rewards:
    made = [RewardConfig(**{**table, "function": f"{MODULE}:{table['function']}"}) for table in tables]
    return Rewards(made, columns=columns)


GIVEN = ("prompts", "completions", "completion_ids", "truncated", "answer")


def test_all_in_their_processes(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"type": "integer"}))
    texts = ["42", r"\boxed{\frac{84}{2}}", "no"]
    arguments = {
        "prompts": [said("What is 6 × 7?")] * 3,
        "completions": [said(text) for text in texts],
        "completion_ids": [[1] * 5, [1] * 15, [1] * 99],
        "truncated": [False] * 3,
        "answer": ["42"] * 3,
    }
    with rewards_of(
        {"function": "exact_answer"},
        {"function": "math_answer", "options": {"seconds": 3}},
        {"function": "matches_pattern", "options": {"pattern": OverrideText("[0-9]+")}},
        {"function": "overlong_penalty", "options": {"limit": 20, "buffer": 10}},
        {"function": "matches_schema", "options": {"schema_file": OverrideText(path)}},
        columns=GIVEN,
    ) as rewards:
        expected = [[1, 1, 1, 0, 1], [1, 1, 0, -0.5, 0], [0, 0, 0, -1, 0]]
        np.testing.assert_array_equal(rewards(arguments), expected)


def test_the_process_imports_no_torch() -> None:
    script = (
        f"import sys; from {MODULE} import *; exact_answer(['1'], ['1'])\n"
        "print(*sys.modules.keys() & {'torch', 'numpy', 'pydantic', 'sympy', 'jsonschema'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    lines = Path(common_rewards.__file__).read_text().splitlines()
    assert not [line for line in lines if re.match(r"\s*(from|import) (fsdp2kit|torch)", line)]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("matches_pattern", {"patern": "a"}, r"the function has no argument 'patern'; did you mean pattern\?"),
        ("matches_pattern", {}, "missing a required argument: 'pattern'; correct it"),
        ("matches_pattern", {"pattern": "a("}, r"pattern = 'a\(' is no regular expression: missing \), .*; correct"),
        ("matches_pattern", {"pattern": 3}, "pattern = 3 is no text; correct it"),
        ("exact_answer", {"column": "x"}, "the function has no argument 'column'; name it among"),
        ("exact_answer", {"completions": []}, "'completions' is what every call is given; give the option another"),
        ("math_answer", {"seconds": 0.5}, "seconds = 0.5 is no whole number from 1 on"),
        ("overlong_penalty", {"limit": 10}, "missing a required argument: 'buffer'"),
        ("overlong_penalty", {"limit": 10, "buffer": 20}, "limit = 10, buffer = 20: they are whole numbers"),
        ("matches_schema", {}, "give one of schema and schema_file"),
        ("matches_schema", {"schema": {"type": "table"}}, "schema is no JSON schema: 'table' is not valid"),
        ("matches_schema", {"schema": 3}, "schema is no JSON schema: it is no table"),
    ],
)
@pytest.mark.parametrize("columns", [GIVEN, pytest.param((), marks=pytest.mark.full)])
def test_wrong_options_are_a_line_at_the_start(
    function: str, options: dict[str, Any], message: str, columns: tuple[str, ...]
) -> None:
    with pytest.raises(UserError, match=rf"^reward\.0\.options: {MODULE}:{function}: {message}") as error:
        rewards_of({"function": function, "options": options}, columns=columns)
    assert "\n" not in str(error.value)


def test_a_file_that_is_absent_or_no_schema(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    with pytest.raises(ValueError, match=r"schema_file = '.*schema\.json': no such file"):
        rewards_of({"function": "matches_schema", "options": {"schema_file": str(path)}})
    path.write_text("{")
    with pytest.raises(UserError, match=r"^reward\.0\.options: .*schema\.json is no JSON schema: Expecting"):
        rewards_of({"function": "matches_schema", "options": {"schema_file": str(path)}})


@pytest.mark.parametrize(
    ("package", "function", "options"),
    [("math_verify", "math_answer", {}), ("jsonschema", "matches_schema", {"schema": SCHEMA})],
)
def test_a_missing_extra_is_named(
    package: str, function: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    command = rf"pip install '{package.replace('_', '-')}>=[0-9.]+'"
    message = rf"needs {package}, which cannot be imported \(not here\): install it: {command}; then"
    with pytest.raises(UserError, match=rf"^reward\.0\.options: {MODULE}:{function}: {message}"):
        rewards_of({"function": function, "options": options})


def test_a_pattern_that_takes_too_long_is_ended() -> None:
    table = {"function": "matches_pattern", "options": {"pattern": "(a+)+b"}, "timeout_seconds": 0.5}
    started = time.monotonic()
    with rewards_of(table) as rewards, pytest.raises(UserError, match=r"did not answer within 0\.5 s"):
        rewards({"completions": ["a" * 60], "completion_ids": [[1]]})
    assert time.monotonic() - started < 20


def test_options_of_a_function_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def near(completions, answer, *, most=1, **_):\n    return [most for _ in completions]\n")
    columns = ("completions", "answer")
    for options, expected in (({}, 1), ({"most": 7}, 7)):
        with Rewards([RewardConfig(function=f"{path}:near", options=options)], columns=columns) as rewards:
            assert rewards({"completions": ["a"], "answer": ["b"]}) == [[expected]]
    with pytest.raises(UserError, match=r"^reward\.0\.options: .*no argument 'mots'; did you mean most\?"):
        Rewards([RewardConfig(function=f"{path}:near", options={"mots": 7})], columns=columns)


@pytest.mark.full
def test_a_changed_option_is_another_reward(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"

    def kept(function: str, **options: Any) -> dict[str, Any]:
        path.write_text(json.dumps(options.pop("written", {})))
        with rewards_of({"function": function, "options": options}) as rewards:
            return {name: vars(content) for name, content in rewards.contents.items()}

    before, same = (kept("overlong_penalty", limit=20, buffer=10) for _ in range(2))
    assert changes(before, same) == []
    assert changes(before, kept("overlong_penalty", limit=20, buffer=5)) == [
        "reward.overlong_penalty (option buffer changed)"
    ]
    before = kept("matches_schema", schema_file=str(path))
    assert changes(before, kept("matches_schema", schema_file=str(path))) == []
    after = kept("matches_schema", schema_file=str(path), written=SCHEMA)
    assert changes(before, after) == ["reward.matches_schema (option schema_file changed)"]
    assert before["reward.matches_schema"]["digest"] != after["reward.matches_schema"]["digest"]
    files = code_digests(f"{MODULE}:exact_answer")
    assert [*files] == ["fsdp2kit/__init__.py", "fsdp2kit/rl/__init__.py", "fsdp2kit/rl/common_rewards.py"]
    assert kept("exact_answer")["reward.exact_answer"]["files"] == files, "nothing else counts without options"


def test_the_check_refuses_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "toml/grpo_demo.toml"
    (tmp_path / "schema.json").write_text("{}")
    text = demo.read_text(encoding="utf-8").replace('"demo/', f'"{demo.parent}/demo/')
    text = text[: text.index("[[reward]]")] + text[text.index("[[reward]]") :].partition("\n\n")[2]
    toml = tmp_path / "mine.toml"
    for table, code, line in (
        ('function = "F:matches_schema"\noptions = { schema_file = "schema.json" }', 0, "matches_schema, imported"),
        ('function = "F:matches_pattern"\noptions = { pattern = "(" }', 2, "error: reward.0.options: "),
        ('function = "F:matches_schema"\noptions = { schema_file = "absent.json" }', 2, "absent.json': no such file"),
    ):
        toml.write_text(f"{text}\n[[reward]]\n{table.replace('F:', MODULE + ':')}\n", encoding="utf-8")
        assert run_main([str(toml), "--check", "mesh.cp=1"]) == code, capsys.readouterr()
        captured = capsys.readouterr()
        assert line in captured.out + captured.err
        assert code == 0 or captured.err.count("\n") == 1
