"""Messages as the data writes them → OpenAI's: role, content, tool_calls. No chat template is asked here.

Read are ShareGPT's roles and keys; calls and results of OpenAI, Anthropic, LangChain and ms-swift, as turns or as
parts of a content; thoughts; and whether a turn is learnt. A chat template may read what is left, which is judged in
`fsdp2kit.data.fitting`: `is_text` says what may not be left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fsdp2kit.data.fields import is_text, media_in, no_media, shortened, thought_in
from fsdp2kit.data.json_texts import load_json, parsed
from fsdp2kit.data.names import (
    ARGUMENTS,
    CALL_IDS,
    CALL_NAMES,
    CALL_ROLES,
    CALLS,
    FLAG_VALUES,
    FLAGS,
    LIKE_A_FLAG,
    MEDIA,
    OPPOSITE,
    PLAIN,
    REASONING,
    RESULT_KEYS,
    RESULTS,
    ROLES,
    TEXTS,
    THOUGHT_KEYS,
    THOUGHTS,
)
from fsdp2kit.errors import UserError

Message = dict[str, Any]
Messages = list[Message]
TrainOn = Literal["assistant", "all", "last"]

BESIDE = ("tool_calls", *REASONING)
"""Fields with text of a turn, beside its content."""

_TODO = 'a row needs "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'


def check_messages(messages: Any, where: str, *, name: str = "messages") -> Messages:
    """The messages as a list of dicts without None values, which pyarrow fills in for missing keys.

    What other tools write in another way becomes OpenAI's: ShareGPT's ``{"from": "human", "value": "…"}``, Anthropic's
    parts of a content. One message may become several.

    Raises:
        UserError: a message has another form; it names the row and the message.
    """
    if isinstance(messages, Sequence) and not messages:
        raise nothing_said(where, name)
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        kinds = "a list" if name == "messages" else "a text or a list of messages"
        todo = _TODO if name == "messages" else "give one of these"
        raise UserError(where, f"{name} is {type_of(messages)}, not {kinds}", todo)
    found: Messages = []
    for position, message in enumerate(messages):
        is_call = isinstance(message, Mapping) and message.get("from", message.get("role")) in CALL_ROLES
        read = _check_message(message, where, f"{name}[{position}]", before=found)
        if is_call and found and found[-1]["role"] == "assistant":
            found[-1] = _one_turn(found[-1], read[0], where, f"{name}[{position}]")
        else:
            found += read
    return found


def nothing_said(where: str, name: str) -> UserError:
    """The error of a list without messages."""
    return UserError(where, f"{name} is empty", _TODO)


def _one_turn(message: Message, call: Message, where: str, name: str) -> Message:
    """A turn of the assistant with the calls of ShareGPT's or ms-swift's turn behind it, which belong to it."""
    marks = [learnt_by(one, where, name) for one in (message, call)]
    if marks[0] != marks[1] and False in marks:
        what = f"{name} and the turn before it are one turn of the assistant, and are learnt otherwise"
        raise UserError(where, what, "mark both alike")
    if "reasoning_content" in call:
        what = f"{name} thinks again within a turn of the assistant"
        raise UserError(where, what, "put the thought before the turn")
    return {**message, "tool_calls": [*message.get("tool_calls", ()), *call["tool_calls"]]}


def _check_message(message: Any, where: str, name: str, *, before: Sequence[Message]) -> Messages:
    if not isinstance(message, Mapping):
        raise UserError(where, f"{name} is {type_of(message)}, not an object", _TODO)
    message = _read_fields(message, where, name)
    if not isinstance(message.get("role"), str):
        raise UserError(where, f"{name} has no role", _TODO)
    _check_calls(message, where, name)
    content = message.get("content")
    if content is None and not any(message.get(field) for field in BESIDE):
        raise UserError(where, f"{name} has no content", _TODO)
    if content is not None and not isinstance(content, (str, list)):
        raise UserError(where, f"{name}.content is {type_of(content)}, not text", _TODO)
    return _unfolded(message, where, name, before) if isinstance(content, list) else [message]


def type_of(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _check_calls(message: Message, where: str, name: str) -> None:
    """Turn a message's tool calls into a list of objects without None, in place; an empty list is removed."""
    if "tool_calls" not in message:
        return
    calls = parsed(message["tool_calls"], where, f"{name}.tool_calls")
    if not calls:
        message.pop("tool_calls")
        return
    if not isinstance(calls, Sequence) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping) for call in calls
    ):
        todo = 'give [{"type": "function", "function": {"name": "…", "arguments": {…}}}]'
        raise UserError(where, f"{name}.tool_calls is no list of calls", todo)
    message["tool_calls"] = [_call_without_none(call) for call in calls]


def _call_without_none(call: Mapping[str, Any]) -> Message:
    """The call without None values, which pyarrow fills in; None among the arguments stays."""
    kept = {key: value for key, value in call.items() if value is not None}
    if "function" in kept:
        kept["function"] = {key: value for key, value in kept["function"].items() if value is not None}
    elif "args" in kept and "arguments" not in kept:  # LangChain's
        kept["arguments"] = kept.pop("args")
    return kept


def _read_fields(message: Mapping[str, Any], where: str, name: str) -> Message:
    """A message with what other tools call by other names under OpenAI's: role, content, tool_calls.

    None values, which pyarrow fills in for missing keys, are left out.

    Raises:
        UserError: it names the row and the field.
    """
    message = {key: value for key, value in message.items() if value is not None}
    if message.keys() == PLAIN and message["role"] not in CALL_ROLES:
        return message
    if "from" in message and "role" not in message:
        role = message.pop("from")
        content = message.pop("value", None)
        if content is not None and message.get("content") not in (None, "", content):
            raise UserError(where, f"{name} has value and content, which differ", "leave one of them out")
        is_call = role in CALL_ROLES
        message = {"role": ROLES.get(role, role) if isinstance(role, str) and not is_call else role, **message}
        if content is not None:
            message["content"] = content
    if message.get("role") in CALL_ROLES:
        _read_call_turn(message, where, name)
    if "function_call" in message:  # OpenAI's former name of tool_calls
        if message.get("tool_calls"):
            raise UserError(where, f"{name} has function_call and tool_calls", "leave one of them out")
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if message.get("role") == "assistant":
        _read_refusal(message, where, name)
        _read_reasoning(message, where, name)
    if key := media_in(message):
        raise no_media(where, f"{name}.{key}", key)
    if message.get("prefix") is True:
        raise UserError(where, f"{name}.prefix is true: the turn is only begun", "drop the row, or end the turn")
    learnt_by(message, where, name)
    return message


def _read_call_turn(message: Message, where: str, name: str) -> None:
    """A turn of ShareGPT or ms-swift that is a call, in JSON, as one of the assistant with tool calls, in place."""
    content = message.pop("content", None)
    thought = None
    if isinstance(content, str) and (found := thought_in(content)) is not None:  # LLaMA-Factory's
        thought, content = found
    value = content
    if isinstance(content, str):
        try:
            value = load_json(content, where, name)
        except json.JSONDecodeError:
            value = None
    calls: list[Any] = value if isinstance(value, list) else [value]
    are_calls = [isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls]
    if not are_calls or not all(are_calls):
        what = f'{name} is a call (role "{message["role"]}"), and its text is no JSON of calls: {shortened(content)}'
        raise UserError(where, what, 'write {"name": "…", "arguments": {…}}, or a list of these')
    message["role"] = "assistant"
    message["tool_calls"] = [{"type": "function", "function": {**call}} for call in calls]
    if thought:
        message["reasoning_content"] = thought


def _read_refusal(message: Message, where: str, name: str) -> None:
    """OpenAI's text of an assistant that refuses, in place of a content."""
    refusal = message.get("refusal")
    if not isinstance(refusal, str) or not refusal.strip():
        if not refusal:
            message.pop("refusal", None)
        return
    if message.get("content"):
        raise UserError(where, f"{name} has a content and a refusal", "leave one of them out")
    message["content"] = message.pop("refusal")


def _read_reasoning(message: Message, where: str, name: str) -> None:
    """Keep one of a thought's names, in place."""
    given = [key for key in REASONING if message.get(key)]
    for key in given:
        value = message[key]
        if not isinstance(value, (str, bool, int, float)):
            raise UserError(where, f"{name}.{key} is of type {type(value).__name__}, not text", "make it a text")
    texts = [key for key in given if isinstance(message[key], str)]
    for key in texts[1:]:
        if message[key] != message[texts[0]]:
            raise UserError(where, f"{name} has {texts[0]} and {key}, which differ", "leave one of them out")
        message.pop(key)


def learnt_by(message: Mapping[str, Any], where: str, name: str) -> bool | None:
    """Whether a message says that it is learnt; None: it does not say.

    Raises:
        UserError: it says so in another way than by 0 or 1, or its fields contradict each other.
    """
    if message.keys() <= PLAIN:
        return None
    said: dict[str, bool] = {}
    for key, value in message.items():
        is_number = isinstance(value, (bool, int, float))
        if key in FLAGS or key == OPPOSITE:
            is_set = FLAG_VALUES.get(str(value).strip().lower()) if is_number or isinstance(value, str) else None
            if is_set is None:
                what = f"{name}.{key} is {shortened(value)}, and a turn is learnt wholly or not at all"
                raise UserError(where, what, "write 0 or 1, or take the field out")
            said[key] = is_set != (key == OPPOSITE)
        elif LIKE_A_FLAG.search(key) and (is_number or isinstance(value, list) or str(value) in FLAG_VALUES):
            what = f"{name}.{key} is {shortened(value)}, which may say what is learnt, and is not read here"
            raise UserError(where, what, "call it loss_mask (1: the turn is learnt, 0: it is not), or take it out")
    if len(set(said.values())) > 1:
        named = " and ".join(f"{key} = {json.dumps(message[key])}" for key in said)
        raise UserError(where, f"{name} has {named}, which contradict each other", "leave one of them out")
    return next(iter(said.values()), None)


def marks_of(messages: Sequence[Message], where: str) -> list[bool | None]:
    """What each message says of whether it is learnt; None: nothing."""
    return [learnt_by(message, where, f"messages[{at}]") for at, message in enumerate(messages)]


def learnt_turns(
    messages: Sequence[Message], marks: Sequence[bool | None], learn_from: int, train_on: TrainOn, where: str
) -> tuple[int, ...]:
    """The assistant's turns that are learnt, by their indices.

    Raises:
        UserError: the messages allow no turn to be learnt, or a mark cannot be followed.
    """
    for at, (message, mark) in enumerate(zip(messages, marks, strict=True)):
        its = f'messages[{at}] (role "{message["role"]}")'
        if mark and message["role"] != "assistant" and train_on != "all":
            what = f"{its} is marked as learnt, and only turns of the assistant are"
            raise UserError(where, what, 'take the mark out, or set data.train_on = "all"')
        if mark is False and train_on == "all":
            what = f'{its} is marked as not learnt, and data.train_on = "all" learns every token'
            raise UserError(where, what, 'set data.train_on = "assistant", or take the mark out')
    found = [at for at, one in enumerate(messages) if one["role"] == "assistant" and at >= learn_from]
    found = found[-1:] if train_on == "last" else found
    learnt = tuple(at for at in found if marks[at] is not False)
    if found and not learnt:
        which = "the last turn" if train_on == "last" else "every turn"
        what = f"{which} of the assistant is marked as not learnt, so the row has nothing to learn"
        raise UserError(where, what, "drop the row, or mark a turn as learnt")
    return learnt


def _unfolded(message: Message, where: str, name: str, before: Sequence[Message]) -> list[Message]:
    """A message whose content is a list of parts, as messages whose contents are texts.

    Calls become ``tool_calls``, results messages of the role "tool", thoughts ``reasoning_content``. Parts of other
    types stay, for the template to judge.

    Args:
        before: the messages before this one, whose calls name the functions of its results.

    Raises:
        UserError: a part holds media, or stands where it cannot be read; it names the row and the part.
    """
    parts = message["content"]
    role = message["role"]
    rest = {key: value for key, value in message.items() if key != "content"}
    found: list[Message] = []
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for number, part in enumerate(parts):
        its = f"{name}.content[{number}]"
        kind, part = _typed(part, where, its)
        if kind in TEXTS:
            text = _text_of(part, TEXTS[kind], where, its)
            if calls and text.strip():
                raise _misplaced(where, its, kind, "follows a call", "end the turn with its calls")
            texts.append({"type": "text", "text": text})
        elif kind in THOUGHTS:
            if role != "assistant":
                raise _misplaced(where, its, kind, f'stands in a message of role "{role}"', "move or drop it")
            if texts or calls:
                raise _misplaced(where, its, kind, "follows a text or a call", "begin the turn with its thoughts")
            thoughts.append(_thought_of(part, where, its))
        elif kind in CALLS:
            if role != "assistant":
                raise _misplaced(where, its, kind, f'stands in a message of role "{role}"', "move or drop it")
            calls.append(_call_of(part, where, its))
        elif kind in RESULTS:
            if role not in ("user", "tool", "function"):
                raise _misplaced(where, its, kind, f'stands in a message of role "{role}"', 'use the role "user"')
            if texts:
                found.append({**rest, "content": texts})
                texts = []
            found.append({**_flags_of(rest), **_result_of(part, before, where, its)})
        else:
            texts.append(part)
    if thoughts:
        thought = "\n\n".join(thoughts)
        if any(rest.get(key, thought) != thought for key in REASONING):
            raise UserError(where, f"{name} has a thought in its content and another beside it", "leave one out")
        rest = {key: value for key, value in rest.items() if key not in REASONING}
        rest["reasoning_content"] = thought
    if calls:
        if rest.get("tool_calls") and not _same_calls(rest["tool_calls"], calls):
            what = f"{name} has calls in its content and others in tool_calls"
            raise UserError(where, what, "leave one of them out")
        rest.setdefault("tool_calls", calls)
    if texts or not (found or thoughts or calls):
        return [*found, {**rest, "content": texts}]
    return found or [rest]


def _typed(part: Any, where: str, name: str) -> tuple[str, Message]:
    """A part's type, in lower case with ``_``, and the part without None values."""
    if isinstance(part, str):
        return "text", {"text": part}
    if not isinstance(part, Mapping):
        what = f"{name} is of type {type(part).__name__}, neither a text nor an object"
        raise UserError(where, what, 'write {"type": "text", "text": "…"}')
    part = {key: value for key, value in part.items() if value is not None}
    kind = str(part.get("type") or next((key for key in ("text", *THOUGHTS) if key in part), "unknown"))
    kind = kind.lower().replace("-", "_")
    plain = kind.removeprefix("input_").removesuffix("_url")
    for medium in MEDIA:
        if plain == medium or part.get(medium) or part.get(f"{medium}_url"):
            raise no_media(where, name, medium)
    return kind, part


def _misplaced(where: str, name: str, kind: str, what: str, todo: str) -> UserError:
    return UserError(where, f"{name} is of type {kind} and {what}", todo)


def _check_rest(part: Message, read: Sequence[str], where: str, name: str) -> None:
    """Refuse a text in a part beside what is read of it."""
    for key, value in part.items():
        if key not in (*read, "type") and is_text(key, value):
            what = f"{name}.{key} is {shortened(value)}, which is not read here"
            raise UserError(where, what, "make it a part of its own, or take it out")


def _text_of(part: Message, key: str, where: str, name: str) -> str:
    text = part.get(key, "" if key == "text" else part.get("text"))
    if not isinstance(text, str):
        raise UserError(where, f"{name}.{key} is of type {type(text).__name__}, not text", "make it a text")
    _check_rest(part, (key,), where, name)
    return text


def _thought_of(part: Message, where: str, name: str) -> str:
    """The text of a thought: a text, or a list of parts (Mistral's; OpenAI's summaries)."""
    given = {key: part[key] for key in THOUGHT_KEYS if part.get(key)}
    if len(given) > 1:
        raise UserError(where, f"{name} has {' and '.join(given)}", "leave one of them out")
    _check_rest(part, [*given, "encrypted_content"], where, name)
    for key, value in given.items():
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return _joined_texts(value, where, f"{name}.{key}")
        raise UserError(where, f"{name}.{key} is of type {type(value).__name__}, not text", "make it a text")
    raise UserError(where, f"{name} is a thought without text", "drop the part")


def _joined_texts(parts: Sequence[Any], where: str, name: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        kind, part = _typed(part, where, f"{name}[{number}]")
        if kind not in TEXTS:
            raise UserError(where, f"{name}[{number}] is of type {kind}, and only text is read", "drop the part")
        texts.append(_text_of(part, TEXTS[kind], where, f"{name}[{number}]"))
    return "\n".join(texts)


def _call_of(part: Message, where: str, name: str) -> Message:
    """A part that is a call, as OpenAI writes calls."""
    inner = next((part[key] for key in ("function", *CALLS) if isinstance(part.get(key), Mapping)), part)
    function = next((inner[key] for key in CALL_NAMES if key in inner), None)
    if not isinstance(function, str):
        raise UserError(where, f"{name} is a call without a name", "name its function")
    given = [key for key in ARGUMENTS if key in inner]
    if len(given) > 1:
        raise UserError(where, f"{name} has {' and '.join(given)}", "leave one of them out")
    _check_rest(inner, (*CALL_NAMES, *ARGUMENTS), where, name)
    call: Message = {"type": "function", "function": {"name": function, "arguments": inner[given[0]] if given else {}}}
    number = next((one[key] for one in (part, inner) for key in ("id", "call_id", "toolCallId") if key in one), None)
    return call if number is None else {"id": number, **call}


def _result_of(part: Message, before: Sequence[Message], where: str, name: str) -> Message:
    """A part that is the result of a call, as a message of the role "tool"."""
    given = [key for key in RESULT_KEYS if key in part]
    if len(given) > 1:
        raise UserError(where, f"{name} has {' and '.join(given)}", "leave one of them out")
    _check_rest(part, (*RESULT_KEYS, *CALL_NAMES), where, name)
    value = part[given[0]] if given else ""
    if isinstance(value, list) and any(isinstance(one, Mapping) and "type" in one for one in value):
        value = _joined_texts(value, where, f"{name}.{given[0]}")
    message: Message = {
        "role": "tool",
        "content": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
    }
    number = next((part[key] for key in CALL_IDS if key in part), None)
    calls = [call for one in before for call in one.get("tool_calls", ()) if call.get("id", part) == number]
    function = next((one[key] for one in (part, *map(_function, calls)) for key in CALL_NAMES if key in one), None)
    if number is not None:
        message["tool_call_id"] = number
    if function is not None:
        message["name"] = function
    return message


def _function(call: Message) -> Message:
    return call.get("function", call)


def _flags_of(message: Message) -> Message:
    return {key: value for key, value in message.items() if key in FLAGS or key == OPPOSITE}


def _same_calls(one: Any, other: Any) -> bool:
    return _plain_calls(one) == _plain_calls(other)


def _plain_calls(calls: Any) -> list[tuple[Any, Any]]:
    """Names and arguments of calls in any form."""
    found = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", function.get("args"))
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        found.append((function.get("name"), arguments))
    return found
