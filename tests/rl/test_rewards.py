"""Reward functions in their processes: what they are given, and what becomes of each fault."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp2kit.config.sections.reward import RewardConfig
from fsdp2kit.data.tokens import Prompt
from fsdp2kit.errors import UserError
from fsdp2kit.rl.engines.engine import Response
from fsdp2kit.rl.rewards import rewards as rewards_module
from fsdp2kit.rl.rewards.rewards import Rewards, arguments_of

FUNCTIONS = '''
import asyncio, json, os, sys, time

def whole(prompts, completions, truncated, target, **columns):
    """Everything that is given is used."""
    print("a print is no answer")
    found = []
    for prompt, completion, cut, wanted in zip(prompts, completions, truncated, target):
        conversation = prompt + completion
        assert [one["role"] for one in conversation] == ["system", "user", "assistant"]
        found.append(float(conversation[-1]["content"] == wanted) - cut)
    return found

def lengths(completion_ids, **_):
    return [len(ids) or None for ids in completion_ids]

def raises(completions, **_):
    for one in completions:
        last = 1 / (one[0]["content"] != "b")
    return [last] * len(completions)

def _inverse(text):
    return 1 / (text != "bad\\nanswer")

def raises_within(prompts, completions, **_):
    return [_inverse(completions[at][0]["content"]) for at in range(len(prompts))]

def raises_at_all(**_):
    raise KeyError("weights")

def hangs(**_):
    time.sleep(60)

def is_nan(completions, **_):
    return [0.0] * (len(completions) - 1) + [float("nan")]

def too_few(completions, **_):
    return [0.0]

def ends(**_):
    os._exit(3)

def leaves(**_):
    sys.exit("enough")

def words(completions, **_):
    return ["good"] * len(completions)

meeting = asyncio.Barrier(3) if hasattr(asyncio, "Barrier") else None

async def _score(text):
    # Each waits for the other two: run one after another, they would never end.
    if meeting is not None:
        await meeting.wait()
    await asyncio.sleep(0.01)
    return float(text == "b")

async def awaits(completions, target, **columns):
    """Gathers by itself, in the loop of the call before."""
    return await asyncio.gather(*(_score(one[0]["content"]) for one in completions))

def hands_on(completions, **_):
    """A plain function of coroutines."""
    return [_score(one[0]["content"]) for one in completions]

class Judge:
    async def __call__(self, completions, **_):
        return [2.0 for _ in completions]

judge = Judge()

async def raises_awaited(completions, **_):
    for one in completions:
        await asyncio.sleep(0)
        last = 1 / (one[0]["content"] != "b")
    return [last] * len(completions)

async def hangs_awaited(**_):
    await asyncio.sleep(60)
'''


def arguments() -> dict[str, list[Any]]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say a"}]
    prompts = [Prompt({"messages": messages, "target": "a"}, messages, [1, 2])] * 3
    responses = [Response(ids, [], is_whole=bool(ids)) for ids in ([5], [6, 7], [])]
    return arguments_of(prompts, responses, ["a", "b", "a"])


@contextmanager
def functions(folder: Path, *names: str, **options: Any) -> Iterator[Rewards]:
    path = folder / "mine.py"
    path.write_text(FUNCTIONS)
    with Rewards([RewardConfig(function=f"{path}:{name}", **options) for name in names]) as rewards:
        yield rewards


def test_several_functions_see_conversations_and_columns(tmp_path: Path) -> None:
    with functions(tmp_path, "whole", "lengths", weight=0.5) as rewards:
        assert rewards.names == ["whole", "lengths"]
        for _ in range(2):
            np.testing.assert_array_equal(rewards(arguments()), [[1, 1], [0, 2], [0, 0]])
    assert rewards._workers[0]._process.exit_code(0) is not None, "its process ends with the block"


def test_coroutines_are_awaited_beside_plain_functions(tmp_path: Path) -> None:
    with functions(tmp_path, "awaits", "whole", "hands_on", "judge", timeout_seconds=20) as rewards:
        for _ in range(2):
            np.testing.assert_array_equal(rewards(arguments()), [[0, 1, 0, 2], [1, 0, 1, 2], [0, 0, 0, 2]])


def test_a_column_that_few_rows_have_is_a_keyword_of_every_call(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def counts(completions, tests, **_):\n    return [len(one or ()) for one in tests]\n")
    columns = ["completions", "completion_ids", "prompts", "target", "tests", "truncated"]
    with Rewards([RewardConfig(function=f"{path}:counts")], columns=columns) as rewards:
        np.testing.assert_array_equal(rewards({**arguments(), "tests": ["ab", None, "c"]}), [[2], [0], [1]])
        np.testing.assert_array_equal(rewards(arguments()), [[0], [0], [0]])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r'by zero \(.*mine\.py:19\), given response 2 of 3: prompt "Say a", completion "b"; mend'),
        ("raises_awaited", r'by zero \(.*mine\.py:\d+\), given response 2 of 3: prompt "Say a", completion "b"; mend'),
        ("hangs", r"did not answer within 0\.5 s; mend it, or give it more time"),
        ("hangs_awaited", r"did not answer within 0\.5 s; mend it, or give it more time"),
        ("is_nan", r'returned nan for response 3 of 3: prompt "Say a", completion "a"; return finite'),
        ("too_few", r"returned 1 rewards for 3 responses; return one"),
        ("ends", r"its process ended with exit code 3; "),
        ("leaves", r"SystemExit: enough"),
        ("words", r"ValueError: could not convert string to float: 'good'"),
    ],
)
def test_a_fault_is_one_line(name: str, message: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with functions(tmp_path, name, timeout_seconds=0.5 if name.startswith("hangs") else 30.0) as rewards:
        with pytest.raises(UserError, match=rf"^reward\.0\.function: .*mine\.py:{name}: .*{message}") as error:
            rewards(arguments())
        assert "\n" not in str(error.value)
    assert time.monotonic() - started < 20


def test_the_completion_that_a_function_raises_at_is_shown(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Say " + "it " * 99}]
    prompts = [Prompt({"prompt": asked}, asked, [1]) for _ in range(3)]
    responses = [Response([token], [], is_whole=True) for token in (5, 6, 7)]
    given = arguments_of(prompts, responses, ["good", "bad\nanswer", "good"])
    for name, message in (
        ("raises_within", r'given response 2 of 3: prompt "Say (it )+i?t?…", completion "bad\\nanswer"; mend'),
        (
            "raises_at_all",
            r'KeyError: \S+ \(.*\), given 3 responses, the first of them: prompt .*, completion "good"; mend',
        ),
    ):
        with functions(tmp_path, name) as rewards, pytest.raises(UserError, match=message) as error:
            rewards(given)
        assert len(str(error.value).partition("prompt")[2]) < 200


def test_a_function_that_cannot_be_imported(tmp_path: Path) -> None:
    for name, message in (("absent", "AttributeError"), ("whole", "SyntaxError")):
        path = tmp_path / f"{name}.py"
        path.write_text("x = 1\n" if name == "absent" else "def whole(:\n")
        with pytest.raises(UserError, match=rf"reward\.0\.function: .*{message}.*; mend the function"):
            Rewards([RewardConfig(function=f"{path}:{name}")])
    with pytest.raises(UserError, match="ModuleNotFoundError: No module named 'no_such'"):
        Rewards([RewardConfig(function="no_such.module:f")])
    with pytest.raises(UserError, match="two are named 'same'"):
        Rewards([RewardConfig(function=f"math:{name}", name="same") for name in ("sqrt", "sin")])


TRAINER = """
import json, multiprocessing, subprocess, sys, time
ours, theirs = multiprocessing.Pipe()
command = [sys.executable, sys.argv[1], str(theirs.fileno()), sys.argv[2]]
worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
ours.send(([], {}))
assert ours.recv() == (True, None)
ours.send({})
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.parametrize("name", ["sleeps", "keeps_the_interpreter"])
def test_a_trainer_that_is_killed_takes_a_hanging_function_along(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hang.py"
    path.write_text(
        "import re, time\n\ndef sleeps():\n    time.sleep(60)\n\n"
        "def keeps_the_interpreter():\n    re.match('(a+)+$', 'a' * 60 + 'b')\n"
    )
    worker = Path(rewards_module.__file__).with_name("reward_worker.py")
    command = [sys.executable, "-c", TRAINER, str(worker), f"{path}:{name}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        status = Path(f"/proc/{trainer.stdout.readline().strip()}/stat")
        time.sleep(0.2)
        assert status.exists()
        trainer.kill()
    ends = time.monotonic() + 30
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":  # whose parent is not asked
        assert time.monotonic() < ends, "it lives on"
        time.sleep(0.05)


def test_a_module_on_the_path(tmp_path: Path) -> None:
    with Rewards([RewardConfig(function="statistics:fmean")]) as rewards:
        with pytest.raises(UserError, match=r"TypeError: fmean\(\) got an unexpected keyword argument"):
            rewards(arguments())
        assert rewards({"completions": []}).shape == (0, 1)
