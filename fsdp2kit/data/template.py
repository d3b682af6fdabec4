"""A tokenizer's chat template: it renders messages, marks the assistant's text, and writes the day of the run."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Mapping
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp2kit.config.section import TEMPLATES
from fsdp2kit.data.bounds import Unbounded, bounded, bounds
from fsdp2kit.data.messages import Message
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import gather_objects
from fsdp2kit.job.events import began
from fsdp2kit.model.tokenizer import facts_of, set_facts

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Unicode noncharacters, which text must not hold. `fsdp2kit.data.rendered` checks that.
OPEN = "\ufdd0"
CLOSE = "\ufdd1"
# The empty expression keeps Jinja's trim_blocks from removing a newline that opens the template.
_MACRO = "{% macro fsdp2kit_span() %}{{ '" + OPEN + "' }}{{ caller() }}{{ '" + CLOSE + "' }}{% endmacro %}{{ '' }}"


class Endless(UserError):
    """A template does not come to its end."""


class Template:
    """A tokenizer's chat template, with the tools and variables of one row.

    Args:
        variables: passed to the template, like ``enable_thinking``.
        where: names the row in errors.
    """

    def __init__(self, tokenizer: Tokenizer, *, tools: Any, variables: Mapping[str, Any], where: str) -> None:
        try:
            self.source = _dated(tokenizer.get_chat_template(tools=tools), tokenizer)
            """The template itself."""
        except ValueError as error:
            what = f"the tokenizer has no chat template to use ({str(error).splitlines()[0]})"
            others = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja") if file.stem != "chatml"))
            todo = f'set model.chat_template = "chatml", to another ready one ({others}) or to a Jinja file'
            todo += ", or use an instruction-tuned model's tokenizer"
            raise UserError("model.chat_template", what, todo) from None
        self._marked = mark_answers(self.source)
        self.has_markers = self._marked is not None
        """Whether ``{% generation %}`` says where the assistant's text is."""
        self._tokens = tokenizer.special_tokens_map
        self._tools = tools
        self.has_tools = bool(tools)
        self.where = where
        self._context = {**self._tokens, **variables}
        self.key = (self.source, bool(tools), json.dumps(variables, sort_keys=True, default=str))
        """The template and all that a row adds to it, but for its messages."""

    def with_inputs(self, tools: Any, variables: Mapping[str, Any]) -> Template:
        """The template with other tools and variables."""
        other = copy.copy(self)
        other._tools = tools
        other._context = {**self._tokens, **variables}
        return other

    def render(
        self, messages: list[Message], *, prompt: bool = False, marked: bool = False, with_tools: bool = True
    ) -> str:
        """The text of the messages.

        Args:
            prompt: append the generation prompt.
            marked: put `OPEN` and `CLOSE` around what ``{% generation %}`` encloses.
        """
        try:
            with bounds():
                texts, _ = render_jinja_template(
                    [messages],
                    tools=self._tools if with_tools else None,
                    chat_template=bounded(self._marked if marked else self.source),  # type: ignore (Jinja takes it)
                    add_generation_prompt=prompt,
                    **self._context,
                )
        except TemplateSyntaxError as error:
            what = f"is no Jinja template: line {error.lineno}: {error.message}"
            raise UserError("model.chat_template", what, "mend that line, or choose another template") from None
        except Unbounded as error:
            todo = "set model.chat_template to a template that ends, or drop the row"
            raise Endless(self.where, f"the chat template does not end ({error})", todo) from None
        except SyntaxError as error:  # of Python, which Jinja compiles to
            what = f"the chat template cannot be run ({type(error).__name__}: {error})"
            raise UserError("model.chat_template", what, "nest it less, or choose another template") from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            what = f"the chat template refuses the messages ({error})"
            todo = "change the row to what the template accepts, or set model.chat_template"
            raise UserError(self.where, what, todo) from None
        return texts[0]


def template_variables(tokenizer: Tokenizer) -> frozenset[str]:
    """The variables that a chat template reads beside messages, tools and special tokens, and does not set itself."""
    try:
        source = tokenizer.get_chat_template()
    except ValueError:  # several templates without a default, or none
        return frozenset()
    return _variables_in(source).difference(tokenizer.special_tokens_map)


@lru_cache(maxsize=16)
def _variables_in(source: str) -> frozenset[str]:
    try:
        # In the bounded tree Jinja computes no constant: that of `10 ** 10 ** 12` would never end.
        found = meta.find_undeclared_variables(bounded(mark_answers(source) or source))
    except (TemplateSyntaxError, RecursionError):  # rendering reports it
        return frozenset()
    return frozenset(found - {"messages", "tools", "add_generation_prompt"})


@lru_cache(maxsize=16)
def mark_answers(template: str) -> str | None:
    """The template with `OPEN` and `CLOSE` around what its ``{% generation %}`` markers enclose; None without them.

    The tag becomes a Jinja call block of a macro, which renders the same text between the two characters.
    """
    if not _GENERATION.search(template):
        return None
    template = _END_GENERATION.sub(r"{%\1 endcall \2%}", template)
    return _MACRO + _GENERATION.sub(r"{%\1 call fsdp2kit_span() \2%}", template)


# The day that chat templates write: that on which the run first began, on every rank and after every resume. Templates
# of Llama 3.2, gpt-oss, SmolLM3 and others ask for today's date. Ranks would differ around midnight, and a run that is
# resumed on another day would have other tokens than its checkpoint.
_DAY_FUNCTION = "strftime_now"  # transformers' name of it
_DAY_CALL = re.compile(_DAY_FUNCTION + r"""\(\s*(["'])(.*?)\1\s*\)""")


def settle_day(tokenizer: Tokenizer | None, run_dir: Path) -> None:
    """Give a tokenizer the day on which the run first began, if its template writes one. Collective."""
    if tokenizer is not None and writes_date(tokenizer):
        seconds = gather_objects(began(run_dir) or time.time())[0]
        set_facts(tokenizer, day=datetime.fromtimestamp(seconds).date())


def writes_date(tokenizer: Tokenizer) -> bool:
    """Whether the chat template asks for the date."""
    return _DAY_FUNCTION in str(tokenizer.chat_template)


def day_of(tokenizer: Tokenizer) -> date:
    """The day that the chat template writes: `settle_day`'s, else today."""
    return facts_of(tokenizer).day or datetime.now().date()


def _dated(source: str, tokenizer: Tokenizer) -> str:
    """A template with the day in place of its calls for the date; at midnight, so that no text depends on the hour.

    A function cannot be handed to the template: transformers makes texts of its variables.
    """
    if _DAY_FUNCTION not in source:
        return source
    midnight = datetime.combine(day_of(tokenizer), datetime.min.time())
    return _DAY_CALL.sub(lambda call: json.dumps(midnight.strftime(call[2])), source)
