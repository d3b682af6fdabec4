"""A command that runs as on a host of its own: in a mount namespace where an empty disk lies over one directory."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import subprocess
from collections.abc import Sequence

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of sched.h; `os.unshare` came with Python 3.12


@functools.cache
def why_not() -> str | None:
    """Why this process may not have such a namespace; None if it may."""
    try:
        done = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or None if done.returncode else None


def main(arguments: Sequence[str]) -> int:
    """``DIRECTORY MODULE ARGUMENT …``: run a module as a host on which DIRECTORY is a disk of its own."""
    directory, module, *rest = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    private = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE: no mount below shows outside
    for failed in (
        libc.unshare(_NEW_MOUNTS),
        libc.mount(None, b"/", None, private, None),
        libc.mount(b"none", os.fsencode(directory), b"tmpfs", 0, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return importlib.import_module(module).main(rest)
