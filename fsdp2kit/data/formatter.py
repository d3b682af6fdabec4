"""``data.formatter``: a function of the user's that makes what is read of each row."""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp2kit.data.code import code_digests
from fsdp2kit.errors import UserError
from fsdp2kit.files.python_file import import_file

_PACKAGE = Path(__file__).parents[1]
_RETURN = "return a dict of columns, a list of messages, or a text"


def formatted(function: str, columns: dict[str, Any], where: str) -> dict[str, Any]:
    """The columns that a row becomes; the row itself is not changed.

    Args:
        function: ``path.py:name`` or ``module:name``.
        columns: of the row.
        where: names the row in errors.

    Raises:
        UserError: the function cannot be imported, it raises, or it returns what is no row. It names the row.
    """
    make = _load(function, _time_of(function))
    try:
        made = make(copy.deepcopy(columns))
    except Exception as error:  # the user's code may raise anything
        what = f"data.formatter {_name_of(function)} raised {_described(error)}"
        raise UserError(where, what, "mend the function, or the row") from None
    made = _plain(made)
    if isinstance(made, str):
        return {"text": made}
    if isinstance(made, list):
        return {"messages": made}
    if not isinstance(made, dict) or not all(isinstance(name, str) for name in made):
        kind = "None" if made is None else f"a {type(made).__name__}"
        todo = f"{_RETURN}; rows to be left out are left out of the data"
        raise UserError(where, f"data.formatter {_name_of(function)} returned {kind}", todo)
    return made


def _plain(value: Any) -> Any:
    """Tuples, arrays and their numbers as lists and Python's own numbers, which a file of rows would hold."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def formatter_digest(function: str) -> str:
    """Digest of the function's source, and of what it imports from beside it: other code gives other rows."""
    parts = [function.rpartition(":")[2], code_digests(function)]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=16)
def _load(function: str, time: int) -> Callable[[dict[str, Any]], Any]:
    """The function; a file that was edited, which its ``time`` tells, is loaded anew."""
    source, _, name = function.rpartition(":")
    where = f"data.formatter: {function}"
    # Files beside it can be imported, and shadow nothing.
    folder = str(Path(source).resolve().parent if source.endswith(".py") else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        if source.endswith(".py"):
            module = import_file(source, f"fsdp2kit_formatter_{Path(source).stem}")
        else:
            module = importlib.import_module(source)
        found = getattr(module, name)
    except Exception as error:  # a module's top level may raise anything
        raise UserError(where, f"cannot be imported ({_described(error)})", "mend it") from None
    if not callable(found):
        raise UserError(where, f"is of type {type(found).__name__}, and no function", "name a function of one row")
    return found


def _time_of(function: str) -> int:
    file = Path(function.rpartition(":")[0])
    return file.stat().st_mtime_ns if file.suffix == ".py" and file.is_file() else 0


def _name_of(function: str) -> str:
    """The function with its file's name, without the folders."""
    source, _, name = function.rpartition(":")
    return f"{Path(source).name}:{name}"


def _is_users(file: str) -> bool:
    return not Path(file).is_relative_to(_PACKAGE)


def _described(error: Exception) -> str:
    """The error, and the last line of the user's code that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if "-packages" not in frame.filename and _is_users(frame.filename)]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    if isinstance(error, SyntaxError):
        place = f" at {Path(error.filename or '').name}:{error.lineno}"
    return f"{type(error).__name__}: {error}{place}"
