"""A process that calls one reward function: python reward_worker.py FD FUNCTION

FD is a connection's file descriptor, FUNCTION is ``module:name`` or ``path.py:name``. The process runs this file by
its path, so it imports only what the function imports. The first request is ``(columns, options)``: the keywords of a
call (empty: not known), and further arguments of every call. Its answer says that the function exists and takes both;
then each request, a dict of keyword arguments, gets an answer. Every answer is ``(ok, value)``; the value of an error
is the key of ``[[reward]]`` at fault, what is wrong and what to do. Coroutines are awaited.
"""

import asyncio
import ctypes
import difflib
import importlib
import importlib.util
import inspect
import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GIVEN = ("prompts", "completions", "completion_ids", "truncated")
"""What every call is given besides columns of the rows."""
_MEND = "mend the function"
MOST_SHOWN = 80  # characters of a prompt or completion in a message


def load_function(text: str) -> Callable[..., Any]:
    """The function that ``module:name`` or ``path.py:name`` names."""
    where, _, name = text.rpartition(":")
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))  # as python -m has it
        return getattr(importlib.import_module(where), name)
    sys.path.insert(0, str(Path(where).parent))  # its own neighbours, as in a script
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return getattr(module, name)


class OptionsError(Exception):
    """Options that the function does not take: what is wrong, and what to do."""


def check_options(function: Any, options: Mapping[str, Any]) -> None:
    """Raise an `OptionsError` if an option is no argument of the function, or if its ``check_options`` refuses one.

    A function may have that attribute: it is called with the options, and raises a ValueError or an ImportError.
    """
    try:
        arguments = inspect.signature(function).parameters.values() if options else ()
    except ValueError:  # some functions of C have none
        arguments = ()
    # What **columns would take is no option: a name that is misspelt would do nothing.
    names = [one.name for one in arguments if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for name in options:
        if name in GIVEN:
            raise OptionsError(f"{name!r} is what every call is given", "give the option another name")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            todo = f"did you mean {near[0]}?" if near else "name it among the function's arguments, or leave it out"
            raise OptionsError(f"the function has no argument {name!r}", todo)
    if check := getattr(function, "check_options", None):
        try:
            inspect.signature(check).bind(**options)
            check(**options)
        except (TypeError, ValueError, ImportError) as error:
            todo = "then start again" if isinstance(error, ImportError) else "correct it"
            raise OptionsError(str(error), todo) from None


def check_call(function: Any, columns: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise a TypeError if the function cannot be called with these keywords, an `OptionsError` for the options."""
    if not callable(function):
        raise TypeError(f"it is of type {type(function).__name__}, no function")
    check_options(function, options)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    try:
        if columns:
            signature.bind(**dict.fromkeys([*columns, *options]))
    except TypeError as error:
        takes = f"it is called with {', '.join(columns)}; end its arguments with **columns to take all"
        raise TypeError(f"{error}: {takes}") from None


def end_with_parent() -> None:
    """Have the kernel end this process when the trainer ends, even inside a function that never returns."""
    if sys.platform == "linux":  # elsewhere it ends when the function has returned
        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def describe(error: BaseException) -> str:
    """The error's kind, its first line, and the line of the user's code that it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {reason}{where}" if reason else f"{type(error).__name__}{where}"


def at_fault(error: BaseException, request: Mapping[str, Sequence[Any]]) -> str:
    """The beginnings of the prompt and the completion that a function worked on when it raised.

    A local variable of its calls, the innermost first, holds that completion. If none does, the first of several
    completions is named, and the text says so.
    """
    completions = request["completions"]
    of_each = [(one, text_of(one), ids) for one, ids in zip(completions, request["completion_ids"], strict=True)]
    # Python shares one object among equal texts of one character, so their identity tells nothing.
    parts = [(part, at) for at, of_one in enumerate(of_each) for part in of_one]
    known = {id(part): at for part, at in parts if not (isinstance(part, str) and len(part) < 2) and part is not None}
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        if frame.f_code.co_filename != __file__:
            found = {known[id(value)] for value in frame.f_locals.values() if id(value) in known}
            if len(found) == 1:
                [at] = found
                return f"response {at + 1} of {len(completions)}: {excerpt(request, at)}"
    which = "one response" if len(completions) == 1 else f"{len(completions)} responses, the first of them"
    return f"{which}: {excerpt(request, 0)}"


def excerpt(request: Mapping[str, Sequence[Any]], number: int) -> str:
    """The beginnings of a prompt, from its last message, and of its completion, quoted."""
    named = (("prompt", "prompts"), ("completion", "completions"))
    return ", ".join(f"{name} {shortened(text_of(request[key][number]))}" for name, key in named)


def text_of(messages: Any) -> Any:
    """A text, or the last message's text."""
    return messages if isinstance(messages, str) else messages[-1].get("content")


def shortened(text: Any) -> str:
    """At most `MOST_SHOWN` characters of a text, as JSON quotes it, in one line."""
    text = str(text)
    return json.dumps(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…", ensure_ascii=False)


def plain(rewards: Any) -> list[float | None]:
    """What a function returned as Python's own numbers: numpy's and torch's arrays become lists."""
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    return [None if value is None else float(value) for value in values]


def call(function: Callable[..., Any], keywords: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """What a function returns, awaited if it is a coroutine; of a list of coroutines, all run at once."""

    async def awaited(found: Any) -> Any:
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, (list, tuple)) and any(inspect.isawaitable(one) for one in found):
            return await asyncio.gather(*(awaited(one) for one in found))
        return found

    return loop.run_until_complete(awaited(function(**keywords)))


def main() -> None:
    end_with_parent()
    connection = Connection(int(sys.argv[1]))
    try:
        columns, options = connection.recv()
        function = load_function(sys.argv[2])
        check_call(function, columns, options)
        connection.send((True, None))
    except OptionsError as error:
        connection.send((False, ("options", *error.args)))
        return
    except BaseException as error:  # a module may call sys.exit
        connection.send((False, ("function", describe(error), _MEND)))
        return
    # One loop for every call: a client that the user's module keeps belongs to the loop of its first call.
    loop = asyncio.new_event_loop()
    while True:
        try:
            request = connection.recv()
        except EOFError:  # the trainer has ended
            loop.close()
            return
        try:
            connection.send((True, plain(call(function, {**request, **options}, loop))))
        except BaseException as error:  # a function may call sys.exit
            where = ""
            with suppress(Exception):  # it may have changed what it was given
                where = f", given {at_fault(error, request)}"
            connection.send((False, ("function", f"{describe(error)}{where}", _MEND)))


if __name__ == "__main__":
    main()
