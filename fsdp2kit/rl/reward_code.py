"""What identifies a reward function or an environment: source files of its own, those it imports, and options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2kit.data.code import code_digests as code_digests
from fsdp2kit.data.contents import Content


def content_of_code(function: str, files: Mapping[str, str], *, otherwise: str) -> Content:
    """What identifies the user's code.

    Args:
        function: ``path.py:name`` or ``module:name``; only the last part of a path counts.
        files: digests of its source files, and of its options.
        otherwise: as `Content` has it.
    """
    where, _, name = function.rpartition(":")
    digest = hashlib.blake2b(repr([f"{Path(where).name}:{name}", files]).encode(), digest_size=8).hexdigest()
    return Content(digest, files=files, otherwise=otherwise)


def option_digests(options: Mapping[str, Any]) -> dict[str, str]:
    """Digest of each option, by its name in messages; for a path, ``…_file``, that of the file's content."""
    found = {}
    for name, value in options.items():
        content = Path(value).read_bytes() if name.endswith("_file") else json.dumps(value, sort_keys=True).encode()
        found[f"option {name}"] = hashlib.blake2b(content, digest_size=8).hexdigest()
    return found
