"""What a row gives to the chat template beside its messages: the schemas of tools, and variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp2kit.data.columns import RowColumns
from fsdp2kit.data.json_texts import parsed
from fsdp2kit.data.names import FUNCTIONS
from fsdp2kit.errors import UserError


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
