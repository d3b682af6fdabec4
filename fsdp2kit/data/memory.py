"""Whether this machine has the memory to tokenise a text."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

from fsdp2kit.data.template import Tokenizer
from fsdp2kit.errors import UserError

_LONG = 8 << 20  # characters; shorter texts, such as books, take at most 3 GiB
# Measured with tokenizers 0.22: a tokenizer holds these, and Python's lists of them, until a text is tokenised.
_BYTES_OF_TOKEN = {False: 280, True: 400}  # without and with offsets
# Where the second and the first version of control groups say their limit, what is used, and what could be given back.
_GROUPS = (
    (Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")),
    (Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
)
_SAMPLE = 1 << 15  # characters that are tokenised to estimate how many tokens a text has


def check_room(text: str, where: str, tokenizer: Tokenizer, *, with_offsets: bool) -> None:
    """Refuse a text whose tokens would not fit into this machine's memory: the system would end the process.

    Args:
        where: names the row in the error.
        with_offsets: whether the characters of each token are needed, too.
    """
    free = available_bytes() if len(text) > _LONG else None
    if free is None:
        return
    middle = len(text) // 2
    sample = text[:_SAMPLE] + text[middle : middle + _SAMPLE]
    share = len(tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]) / len(sample)
    tokens = int(share * len(text))
    need = tokens * _BYTES_OF_TOKEN[with_offsets]
    if need > free:
        what = (
            f"a text of {len(text):,} characters, about {tokens:,} tokens, takes {need / 2**30:,.1f} GiB to tokenise, "
            f"and {free / 2**30:,.1f} GiB of memory are free"
        )
        raise UserError(where, what, "cut the row into several, or drop it")


def available_bytes() -> int | None:
    """The memory that this process may still take, without swapping; None if the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    found = [_of_machine(), _of_group(), _of_process()]
    return min((one for one in found if one is not None), default=None)


def _of_machine() -> int | None:
    return _field(Path("/proc/meminfo"), "MemAvailable:", unit=1024)


def _of_group() -> int | None:
    """Free bytes in the container: the limit of its control group, less the memory that it cannot give back."""
    for folder, names in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
            limit = int((folder / names[0]).read_text())
            used = int((folder / names[1]).read_text())
            return max(0, limit - used + (_field(folder / "memory.stat", names[2]) or 0))
    return None


def _of_process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _field(Path("/proc/self/status"), "VmSize:", unit=1024)
    return None if limit == resource.RLIM_INFINITY or used is None else max(0, limit - used)


def _field(file: Path, name: str, *, unit: int = 1) -> int | None:
    """The number after a name in one of the system's files, in bytes."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1]) * unit
    return None
