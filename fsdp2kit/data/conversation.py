"""A conversation, and what a row may give to it beside its messages: a system prompt, tools, template variables.

The formats (`fsdp2kit.data.formats`) read the messages. No chat template is asked here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp2kit.data.columns import RowColumns
from fsdp2kit.data.json_texts import parsed
from fsdp2kit.data.messages import Messages, check_messages, learnt_turns, marks_of, nothing_said
from fsdp2kit.data.names import FUNCTIONS
from fsdp2kit.errors import UserError


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form, and which of them are supervised. A chat template renders them."""

    messages: Messages
    where: str
    """Names the row in errors."""
    tools: Any = None
    """Schemas, as `check_tools` returns them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the template, like ``enable_thinking``."""
    turns: tuple[int, ...] = ()
    """The turns that are learnt, by their indices. All of them are the assistant's."""
    learn_from: int = 0
    """Index of the first message that may be learnt; the messages before it are a prompt."""
    is_prompt: bool = False
    """Whether the model continues it, and nothing of it is learnt."""
    skips_turns: bool = False
    """Whether a message says that it is not learnt."""

    @property
    def has_system_twice(self) -> bool:
        """Whether two system messages follow each other."""
        return ("system", "system") in itertools.pairwise(message["role"] for message in self.messages)


class PlainText(NamedTuple):
    """A prompt and its answer as one plain text, outside any chat template."""

    text: str
    start: int
    """The first supervised character."""
    where: str
    """Names the row in errors."""


class WholeText(NamedTuple):
    """A plain text. Every token of it is supervised."""

    text: str
    where: str
    """Names the row in errors."""


def conversation_of(row: RowColumns, messages: Messages, *, learn_from: int = 0) -> Conversation:
    """The messages with the row's ``tools`` and ``chat_template_kwargs``, and what is learnt of them."""
    variables = variables_in(row)
    tools = tools_in(row)
    marks = marks_of(messages, row.where)
    turns = learnt_turns(messages, marks, learn_from, row.section.train_on, row.where)
    return Conversation(messages, row.where, tools, variables, turns, learn_from, skips_turns=False in marks)


def prompt_of(
    messages: Messages, *, where: str, tools: Any = None, variables: Mapping[str, Any] | None = None
) -> Conversation:
    """A conversation that the model continues.

    Args:
        tools: schemas, as `check_tools` returns them.

    Raises:
        UserError: what a message says of whether it is learnt cannot be read.
    """
    marks_of(messages, where)
    return Conversation(messages, where, tools, variables or {}, is_prompt=True)


def as_messages(value: str | Messages, role: str) -> Messages:
    """Messages: a text is one of ``role``."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def with_system(row: RowColumns, messages: Messages) -> Messages:
    """The messages, behind the system prompt in the row's column ``system`` unless they begin with it."""
    system = row.all.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        what = f"system is of type {type(system).__name__}, not text"
        raise UserError(row.where, what, "make it a text, or rename the column")
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        what = "the row's column system is not the system prompt that its messages begin with"
        raise UserError(row.where, what, "leave one of them out")
    return messages


def only_conversation(row: RowColumns, written: Mapping[str, Any]) -> Messages:
    """The row's conversation in OpenAI's form. The row may have both default columns if they say the same.

    Args:
        written: messages as the data writes them, by the names of their columns; at least one.
    """
    said = [check_messages(messages, row.where, name=name) for name, messages in written.items()]
    if len(said) > 1 and said[0] != said[1]:
        raise ambiguous(row, *(("messages", name) for name in written))
    return said[0]


def ambiguous(row: RowColumns, *choices: tuple[str, str]) -> UserError:
    """The error of a row with two columns that may be meant and differ; each is given by our name and its own."""
    names = " and ".join(repr(name) for _, name in choices)
    todo = " or ".join(f'data.columns.{column} = "{name}"' for column, name in choices)
    return UserError(row.where, f"the row has {names}, which differ", f"say which is meant: {todo}")


def check_kinds(row: RowColumns, prompt: Any, answer: Any, name: str) -> None:
    """Refuse a text beside messages, unless texts are put into the chat template; ``name`` is the answer's column."""
    if row.section.wrap != "chat" and isinstance(prompt, str) != isinstance(answer, str):
        what = f"prompt and {name} are a text and a list of messages"
        raise UserError(row.where, what, "give two of a kind")


def text_or_messages(value: Any, where: str, name: str) -> str | Messages:
    """A text as it is, messages in OpenAI's form; ``name`` is that of their column."""
    return value if isinstance(value, str) else check_messages(value, where, name=name)


def answered(row: RowColumns, prompt: str | Messages, answer: str | Messages) -> Conversation | PlainText:
    """A prompt with its answer, two texts or messages. The prompt is supervised only under ``train_on = "all"``."""
    learns_all = row.section.train_on == "all"
    if isinstance(prompt, str) and isinstance(answer, str) and row.section.wrap != "chat":
        check_is_plain(row)
        if not answer.strip():
            what = "the completion is empty, so the model would learn to end the text at once"
            raise UserError(row.where, what, "drop the row")
        return PlainText(prompt + answer, 0 if learns_all else len(prompt), row.where)
    if answer == []:  # it only repeats the prompt
        raise nothing_said(row.where, "completion")
    before = with_system(row, as_messages(prompt, "user"))
    messages = [*before, *as_messages(answer, "assistant")]
    return conversation_of(row, messages, learn_from=0 if learns_all else len(before))


def check_is_plain(row: RowColumns) -> None:
    """Refuse a system prompt or tools beside a plain text, which would lack them."""
    if row.all.get("system"):
        what = "the row has a system prompt, and its prompt is a plain text"
        raise UserError(row.where, what, 'put texts into the chat template, or rename the column "system"')
    if tools_in(row):
        what = "the row has tools, and its prompt is a plain text"
        raise UserError(row.where, what, "put texts into the chat template, or leave the tools out")


def tools_in(row: RowColumns) -> Any:
    """The schemas of the row's tools, from ``tools`` or its former name ``functions``; None without any."""
    tools = check_tools(row.get("tools"), row.where)
    if row.is_named("tools"):
        return tools
    functions = _functions(row)
    if tools and functions and _schemas(tools) != _schemas(functions):
        what = f"the row has 'tools' and '{FUNCTIONS}', which differ"
        raise UserError(row.where, what, f'say which is meant: data.columns.tools = "tools" or "{FUNCTIONS}"')
    return tools or functions


def _functions(row: RowColumns) -> Any:
    """The schemas in the column ``functions`` in the form of ``tools``; None without any."""
    found = row.all.get(FUNCTIONS)
    if not found:
        return None
    found = parsed(found, row.where, FUNCTIONS)
    found = [found] if isinstance(found, Mapping) else found
    if not found:
        return None
    todo = 'give [{"name": "…", "description": "…", "parameters": {…}}]'
    if not isinstance(found, list):
        raise UserError(row.where, f"{FUNCTIONS} is of type {type(found).__name__}, not a list of schemas", todo)
    tools = []
    for at, one in enumerate(found):
        schema = parsed(one, row.where, f"{FUNCTIONS}[{at}]")
        function = schema.get("function", schema) if isinstance(schema, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(row.where, f"{FUNCTIONS}[{at}] is no schema with a name", todo)
        tools.append(schema if "function" in schema else {"type": "function", "function": schema})
    return check_tools(tools, row.where)


def _schemas(tools: Any) -> Any:
    """Schemas without what is around them, to compare them."""
    return [one.get("function", one) if isinstance(one, Mapping) else one for one in tools]


def check_tools(tools: Any, where: str) -> Any:
    """Tool schemas as a list of objects; None without tools. Any part may be a string of JSON."""
    if tools is None:
        return None
    tools = parsed(tools, where, "tools")
    if not isinstance(tools, list):
        return tools or None
    tools = [parsed(tool, where, f"tools[{at}]") for at, tool in enumerate(tools)]
    for at, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
            parameters = parsed(function["parameters"], where, f"tools[{at}].parameters")
            function = {**function, "parameters": parameters}
            tools[at] = {**tool, "function": function} if "function" in tool else function
    return tools or None


def variables_in(row: RowColumns) -> Mapping[str, Any]:
    """What the row passes to the chat template."""
    variables = row.from_json("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise UserError(row.where, "chat_template_kwargs is no object", 'write {"enable_thinking": false}')
    return variables
