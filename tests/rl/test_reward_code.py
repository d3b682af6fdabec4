"""Which files a reward function is known by, compared with those that Python itself reads when it is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2kit.config.sections.reward import RewardConfig
from fsdp2kit.data.code import code_digests
from fsdp2kit.rl.rewards.rewards import Rewards

FILES = {
    "mine.py": "import json, numpy as np\nimport words\nfrom parts import strings\n\ndef f(**_):\n"
    "    from parts.deep.late import late\n    return late()\n",
    "words.py": "from parts import numbers as n\n",
    "other.py": "def f(**_): ...\n",
    "parts/__init__.py": "from .numbers import one\n",
    "parts/numbers.py": "one = 1\n",
    "parts/strings.py": "from . import numbers\nfrom .deep import late\n",
    "parts/unused.py": "",
    "parts/deep/__init__.py": "",
    "parts/deep/late.py": "from .. import numbers\n\ndef late():\n    return [0.0]\n",
}
USED = sorted(FILES.keys() - {"other.py", "parts/unused.py"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def read_by_python(folder: Path) -> list[str]:
    """The files below the folder whose code runs when the function is imported and called."""
    script = (
        "import sys, mine; mine.f()\n"
        "for one in list(sys.modules.values()): print(getattr(one, '__file__', None) or '')"
    )
    said = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    below = [Path(line) for line in said.stdout.splitlines() if line.startswith(str(folder))]
    return sorted(str(file.relative_to(folder)) for file in below)


def test_its_files_are_those_that_python_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_by_python(folder) == USED
    found = code_digests(f"{folder}/mine.py:f")
    assert list(found) == USED
    monkeypatch.chdir(folder)
    assert code_digests("mine:f") == found
    assert [*code_digests("parts.deep.late:late")] == [
        name for name in USED if "parts/" in name and "strings" not in name
    ]
    for name in FILES:
        (folder / name).write_text((folder / name).read_text() + "\n# another line\n")
        changed = {one for one, digest in code_digests("mine:f").items() if digest != found[one]}
        assert changed == ({name} if name in USED else set())
        found = code_digests("mine:f")


def test_of_an_installed_function_its_own_package_counts() -> None:
    assert code_digests("math:sqrt") == {}
    assert [*code_digests("statistics:fmean")] == ["statistics.py"]
    found = code_digests("yaml:safe_load")
    assert "yaml/__init__.py" in found
    assert {name.partition("/")[0] for name in found} == {"yaml"}


def test_what_a_checkpoint_keeps_of_it(folder: Path) -> None:
    def kept(name: str = "mine.py:f") -> str:
        with Rewards([RewardConfig(function=f"{folder}/{name}", name="right")]) as rewards:
            assert [*rewards.contents] == ["reward.right"]
            return rewards.contents["reward.right"].digest

    before = kept()
    assert kept() == before
    assert kept("other.py:f") != before
    (folder / "words.py").write_text("from parts import numbers\n")
    assert kept() != before
