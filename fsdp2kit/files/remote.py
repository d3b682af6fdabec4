"""Paths that may be URLs of an object store."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from upath import UPath

from fsdp2kit.errors import UserError


def to_path(text: str | Path) -> Path:
    """A path, ``~`` expanded; for ``s3://…`` and any other URL that fsspec knows, an object with a path's methods.

    A path, or such an object, is returned as it is.
    """
    if not isinstance(text, str):
        return text
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(text).expanduser()
    if scheme in ("file", "local"):
        return Path(rest)
    try:
        path = UPath(text)
        path.exists()  # connects: a missing package or credentials show here
    except ImportError as error:
        raise UserError(text, str(error), "install that package") from None
    except ValueError as error:
        raise UserError(text, str(error), "use a URL that fsspec knows, e.g. s3://bucket/folder") from None
    except Exception as error:  # every store has errors of its own
        what = f"cannot be reached ({type(error).__name__}: {error})"
        raise UserError(text, what, "check the URL and your credentials") from None
    return cast(Path, path)


def is_remote(path: Path) -> bool:
    """Whether it lies in an object store, which has no renames, locks or syncs."""
    return not isinstance(path, Path)
