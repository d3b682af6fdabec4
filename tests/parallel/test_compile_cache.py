"""What was compiled is found by the next process, is checked before it is used, and never ends a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit import distributed
from fsdp2kit.config.schema import CompileConfig
from fsdp2kit.errors import UserError
from fsdp2kit.parallel.compile import CompileCache, apply_compile
from fsdp2kit.parity.engine import Sharded
from tests.parallel.jobs import Case
from tests.reference import make_batches, tiny_model_dir
from tests.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_work_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's folder is put back after the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")


def archive(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def fill(cache: CompileCache, name: str, text: str) -> None:
    path = cache.work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.usefixtures("no_work_left")
def test_files_come_back_but_no_locks_and_nothing_half_written(tmp_path: Path) -> None:
    first = CompileCache(tmp_path / "new" / "kept")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(first.work)
    assert first.keep() == []
    assert list((tmp_path / "new" / "kept").iterdir()) == []  # nothing compiled, nothing written
    for name in ("ab/kernel.so", "locks/kernel.lock", "ab/.12.34.tmp"):
        fill(first, name, name)
    assert first.keep() == []
    second = CompileCache(tmp_path / "new" / "kept")
    found = {path.relative_to(second.work).as_posix() for path in second.work.rglob("*") if path.is_file()}
    assert found == {"ab/kernel.so"}
    assert second.work != first.work
    written = archive(tmp_path / "new" / "kept").stat().st_mtime_ns
    assert second.keep() == []
    assert archive(tmp_path / "new" / "kept").stat().st_mtime_ns == written  # nothing new


@pytest.mark.usefixtures("no_work_left")
@pytest.mark.parametrize("damage", ["empty", "half", "a byte", "no archive", "not readable"])
def test_a_damaged_archive_is_said_and_left_unused(damage: str, tmp_path: Path) -> None:
    first = CompileCache(tmp_path)
    fill(first, "a.so", "machine code " * 1000)
    fill(first, "b.so", "machine code " * 1000)
    first.keep()
    path = archive(tmp_path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as opened:
        place = opened.infolist()[1].header_offset + 60  # within the second file's data
    flipped = whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]
    damaged = {"empty": b"", "half": whole[: len(whole) // 2], "a byte": flipped, "no archive": b"x" * len(whole)}
    if damage == "not readable":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(damaged[damage])
    second = CompileCache(tmp_path)
    assert list(second.work.iterdir()) == []
    fill(second, "c.so", "anew")
    first_line, *others = second.keep()
    assert first_line.startswith(f"compile.cache_dir: {path} cannot be read")
    if damage == "not readable":
        assert others[0].startswith(f"compile.cache_dir: {path} was not written")
    else:
        assert not others
        assert (CompileCache(tmp_path).work / "c.so").read_text() == "anew"
    assert second.keep() == []  # said once


@pytest.mark.usefixtures("no_work_left")
def test_ranks_of_the_first_machine_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        cache = CompileCache(tmp_path)
        assert list(cache.work.iterdir()) == ([] if rank < 2 else [cache.work / "kernel.so"])
        fill(cache, "kernel.so", str(rank))
        fill(cache, "another.so", str(rank))
        if rank >= 2:
            assert cache.work.joinpath("kernel.so").exists()
        cache.keep()
        if rank < 2:
            (cache.work / "another.so").unlink()
            cache.keep()
    assert len(list(tmp_path.iterdir())) == 2


def unwritable(folder: Path) -> str:
    distributed.start()
    rank = int(os.environ["RANK"])
    section = CompileConfig(enabled=True, cache_dir=str(folder / ("file" if rank else "folder") / "kept"))
    try:
        apply_compile(section, [])
    except UserError as error:
        return str(error)
    return "no error"


def test_a_folder_that_cannot_be_made_on_one_rank_is_every_ranks_error(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in pool.run(2, unwritable, tmp_path):
        assert message == (
            f"compile.cache_dir: {tmp_path / 'file' / 'kept'} cannot be written to (Not a directory); choose another"
        )


def train_compiled(folder: Path, kept: Path) -> dict[str, Any]:
    """Losses of a few steps with compiled layers, and whether the compiler's results were found."""
    from torch._dynamo.utils import counters

    section = CompileConfig(enabled=True, cache_dir=str(kept))
    config = Case("llama3", attention="varlen").config(folder, steps=2, rows=4)
    sharded = Sharded(config.model_copy(update={"compile": section}), world=distributed.start())
    curves = sharded.curves(make_batches(2))
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
    return {"loss": [loss.hex() for loss in curves.loss], "norm": [norm.hex() for norm in curves.grad_norm], **found}


def in_a_process(folder: Path, kept: Path) -> dict[str, Any]:
    program = (
        "import json, sys; from pathlib import Path; from tests.parallel.test_compile_cache import train_compiled\n"
        "print(json.dumps(train_compiled(Path(sys.argv[1]), Path(sys.argv[2]))))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(kept)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch.compile on a CPU needs g++")
def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    tiny_model_dir("llama3", tmp_path)
    kept = tmp_path / "kept"
    cold = in_a_process(tmp_path, kept)
    size = archive(kept).stat().st_size
    warm = in_a_process(tmp_path, kept)
    assert (cold.pop("hit"), cold.pop("miss")) == (0, 2)  # forward and backward of one layer class
    assert (warm.pop("hit"), warm.pop("miss")) == (2, 0)
    assert archive(kept).stat().st_size == size
    assert warm == cold
