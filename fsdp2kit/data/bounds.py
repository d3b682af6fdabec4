"""Chat templates that end: the rounds of a template's loops and the letters it writes are counted while it renders.

A template comes with a model, so it may be anybody's. Its loops can be nested without end, and its macros can call
themselves. The counts are placed in the template's syntax tree. They need no signal, so they work in every thread and
process, and all ranks count alike; processor time is a second bound, for rounds that are slow.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from jinja2 import TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

ROUNDS = 2_000_000
"""The most rounds of all loops and macros in one rendering. Two nested loops over 800 messages take 640,000."""
LETTERS = 200_000_000
"""That one rendering writes, or holds in one text."""
SECONDS = 6.0
"""Of processor time in one rendering."""
_TIMED = 16  # rounds between two looks at the clock
_HERE = f"{__name__}."


class Unbounded(TemplateRuntimeError):
    """A template does not come to its end."""


class _Counts(threading.local):
    """What the rendering in this thread has used."""

    rounds = 0
    letters = 0
    until = float("inf")


_counts = _Counts()


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """Count one rendering of a `bounded` template.

    Raises:
        Unbounded: a bound was reached.
    """
    _counts.rounds = 0
    _counts.letters = 0
    _counts.until = time.thread_time() + SECONDS
    try:
        yield
    except MemoryError:
        raise Unbounded("its text does not fit") from None
    except RecursionError:
        raise Unbounded("it calls itself, or is nested too deep") from None


@lru_cache(maxsize=32)
def bounded(source: str) -> nodes.Template:
    """A template's syntax tree with counts in it, which Jinja compiles like its source.

    Raises:
        TemplateSyntaxError: it is no Jinja.
    """
    return _Counted().visit(_PARSER.parse(source))


def _count_round(letters: int) -> None:
    """Count a round of a loop or a macro, which writes so many letters of its own."""
    _counts.rounds += 1
    _counts.letters += letters
    if _counts.rounds > ROUNDS:
        raise Unbounded(f"its loops take more than {ROUNDS:,} rounds")
    if _counts.rounds % _TIMED == 0:
        _check_size(_counts.letters)
        if time.thread_time() > _counts.until:
            raise Unbounded(f"it takes more than {SECONDS:.0f} s")


def _count_text(value: Any) -> Any:
    """Count a value that is printed, and return it."""
    if isinstance(value, str):
        _counts.letters += len(value)
        _check_size(_counts.letters)
    return value


def _check_text(value: Any) -> Any:
    """Return a sum, if it is not too long."""
    if isinstance(value, str):
        _check_size(len(value))
    return value


def _check_size(letters: int) -> None:
    if letters > LETTERS:
        raise Unbounded(f"its text has more than {LETTERS:,} letters")


def multiplied(one: Any, other: Any) -> Any:
    """``one * other``."""
    for sized, times in ((one, other), (other, one)):
        if isinstance(sized, (str, list, tuple)) and isinstance(times, int):
            _check_size(len(sized) * times)
    return one * other


def raised(one: Any, other: Any) -> Any:
    """``one ** other``."""
    if isinstance(one, int) and isinstance(other, int):
        _check_size(one.bit_length() * other)
    return one**other


class _Watch:
    """Passes a value on to a function, as ``watch + value``.

    Jinja compiles the operator as it stands. A call of the function goes through the sandbox and takes four times as
    long.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __add__(self, value: Any) -> Any:
        return self._function(value)


ROUND = _Watch(_count_round)
TEXT = _Watch(_count_text)
SUM = _Watch(_check_text)


class _Generation(Extension):
    """``{% generation %}``, whose body is rendered like any other."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


# It reads a source like transformers' environment, which compiles what comes of it.
_PARSER = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])


class _Counted(NodeTransformer):
    """Puts the counts into a template."""

    def __init__(self) -> None:
        self._depth = 0

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._repeated(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._repeated(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._repeated(node)

    def _repeated(self, node: Any) -> nodes.Node:
        letters = sum(len(data.data) for one in node.body for data in _texts_in(one))
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        count = _watched("ROUND", nodes.Const(letters, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        if self._depth:
            is_plain = (nodes.TemplateData, nodes.Const)
            node.nodes = [one if isinstance(one, is_plain) else _watched("TEXT", one) for one in node.nodes]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        # A text that a constant is added to grows by that constant a round.
        is_small = isinstance(node.left, nodes.Const) or isinstance(node.right, nodes.Const)
        return node if is_small else _watched("SUM", node)

    def visit_Mul(self, node: nodes.Mul) -> nodes.Node:
        self.generic_visit(node)
        return _call("multiplied", node)

    def visit_Pow(self, node: nodes.Pow) -> nodes.Node:
        self.generic_visit(node)
        return _call("raised", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _watched("SUM", node)


def _texts_in(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _watched(watch: str, value: nodes.Expr) -> nodes.Expr:
    return nodes.Add(nodes.ImportedName(_HERE + watch, lineno=value.lineno), value, lineno=value.lineno)


def _call(name: str, node: nodes.BinExpr) -> nodes.Expr:
    function = nodes.ImportedName(_HERE + name, lineno=node.lineno)
    return nodes.Call(function, [node.left, node.right], [], None, None, lineno=node.lineno)
