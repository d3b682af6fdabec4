"""Files that are replaced whole or not at all, and files that others may have put there."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from pathlib import Path
from typing import cast

import datasets
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from fsdp2kit.files.local import (
    create_new,
    is_plain_name,
    load_json,
    open_own,
    open_regular,
    read_json,
    read_json_object,
    read_regular,
    read_text,
    replace_file,
    sha256,
    todo_of_cache,
)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    replace_file(path, "new ü")
    assert path.read_bytes() == "new ü".encode()
    replace_file(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]

    def crash(self: Path, target: Path) -> Path:
        assert self.read_bytes() == b"third", "what is renamed is whole"
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(path, "third")
    assert path.read_bytes() == b"\x00\x01"


def test_an_object_store_is_written_to_directly() -> None:
    path = cast(Path, UPath("memory://files/record.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "stored")
    assert path.read_text() == "stored"
    assert [one.name for one in path.parent.iterdir()] == ["record.json"]


def test_a_cache_that_cannot_be_written_is_told_from_other_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "data")

    def todo(number: int, path: str) -> str | None:
        outer = ValueError("the library's own")
        outer.__cause__ = OSError(number, "of the system", str(tmp_path / path))
        return todo_of_cache(outer)

    assert todo(errno.EROFS, "home/hub/models--a--b") == "set HF_HOME to a folder that can be written"
    assert todo(errno.EACCES, "") == "set HF_HOME to a folder that can be written"
    assert todo(errno.EACCES, "data/csv") == "set HF_DATASETS_CACHE to a folder that can be written"
    assert todo(errno.ENOENT, "home/hub/models--a--b/config.json") is None
    assert todo(errno.EACCES, "elsewhere") is None


def odd_files(folder: Path) -> dict[str, Path]:
    """A pipe, a directory, a socket, a device behind a link, and a link that leads nowhere."""
    found = {name: folder / name for name in ("pipe", "directory", "socket", "device", "nowhere")}
    os.mkfifo(found["pipe"])
    found["directory"].mkdir()
    found["device"].symlink_to("/dev/zero")
    found["nowhere"].symlink_to(folder / "none")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(found["socket"]))  # an absolute path may be too long
    return found


@pytest.mark.timeout(20)
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    for path in odd_files(tmp_path).values():
        for read in (open_regular, read_regular, read_text, read_json, sha256):
            with pytest.raises(OSError):
                read(path)
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbf[1, 2]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        assert read_text(tmp_path / name) == "[1, 2]"
        assert read_json(tmp_path / name) == [1, 2]
    with pytest.raises(OSError, match="null"):
        open_regular(tmp_path / "a\0b")


def test_a_digest_reads_no_more_than_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    assert sha256(path, most=3) == hashlib.sha256(b"abc").hexdigest()
    assert sha256(path, most=6) == sha256(path) == hashlib.sha256(b"abcdef").hexdigest()


@pytest.mark.timeout(20)
def test_what_is_written_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "record.json"
    path.symlink_to(victim)
    (tmp_path / "run" / ".record.json.tmp").symlink_to(victim)
    replace_file(path, "ours")
    assert path.read_text() == "ours"
    assert not path.is_symlink()
    with pytest.raises(FileExistsError):
        create_new(tmp_path / "run" / ".record.json.tmp")
    (tmp_path / "run" / "lines").symlink_to(victim)
    with pytest.raises(OSError, match="is a link"):
        open_own(tmp_path / "run" / "lines", os.O_WRONLY | os.O_APPEND)
    for odd in odd_files(tmp_path / "run").values():
        with pytest.raises(OSError):
            open_own(odd, os.O_WRONLY | os.O_APPEND)
    assert victim.read_text() == "theirs"
    assert not (tmp_path / "run" / "none").exists()


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "a", "x")
        os.close(open_own(tmp_path / "b", os.O_WRONLY))
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"} == {0o640}


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, "1" * 5000, "", "{", "nan", b"\xff\xfe", '{"a": 1} x', b'"\xed\xa0\x80"']
)
def test_bad_json_raises_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        load_json(text)


def test_an_object_is_told_from_other_json(tmp_path: Path) -> None:
    for text in ("[]", "1", "null", '"x"'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match="not an object"):
            read_json_object(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["a", "a/b.json", ".metadata", "__0_0.distcp", "hf/a b", "…", "a..b", "..a", "a/b:c"])
def test_plain_names(name: str) -> None:
    assert is_plain_name(name)


ABSOLUTE = ["/", "/etc/passwd", "C:x", "c:/x", "file:///x", "memory://b/x"]
CLIMBING = ["..", "../x", "a/../b", "a/..", ".", "./a", "..\\x"]
ODD = ["", "a//b", "a/", "a\\b", "a\0b", "a\nb", "\x1b[31m", "\x7f"]


ABSOLUTE = ["/", "/etc/passwd", "C:x", "c:/x", "file:///x", "memory://b/x"]
CLIMBING = ["..", "../x", "a/../b", "a/..", ".", "./a", "..\\x"]
ODD = ["", "a//b", "a/", "a\\b", "a\0b", "a\nb", "\x1b[31m", "\x7f"]


@pytest.mark.parametrize("name", [*ABSOLUTE, *CLIMBING, *ODD, None, 3, ["a"], {}, True])
def test_names_that_lead_out(name: object) -> None:
    assert not is_plain_name(name)


@given(st.text(min_size=1, max_size=12) | st.lists(st.sampled_from(["..", ".", "a", "", "/"])).map("/".join))
def test_a_plain_name_stays_inside(name: str) -> None:
    if is_plain_name(name):
        joined = os.path.normpath(os.path.join("/inside/folder", name))  # noqa: PTH118
        assert joined.startswith("/inside/folder/")
