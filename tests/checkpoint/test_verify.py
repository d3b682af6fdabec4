"""``python -m fsdp2kit.checkpoint verify``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2kit.checkpoint.__main__ import main
from tests.checkpoint import jobs


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return jobs.checkpoints_of(tmp_path).save(jobs.progress_at(1))


def test_a_whole_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    assert capsys.readouterr().out.startswith(f"{checkpoint}: whole: step 1, 5 files")


def test_a_flipped_byte(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["verify", str(checkpoint)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}: does not have the checksum")
    assert error.count("\n") == 1


def test_no_torch_is_imported(checkpoint: Path) -> None:
    code = (
        "import sys; from fsdp2kit.checkpoint.__main__ import main; "
        f"assert main(['verify', {str(checkpoint)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
