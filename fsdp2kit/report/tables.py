"""Tables of a page: starts and what changed between them, configs and environments of runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from fsdp2kit.job.events import flat
from fsdp2kit.report.ends import End
from fsdp2kit.report.read import Start

Table = dict[str, Any]
"""``title``, ``head`` (column names), ``rows`` (lists of text and numbers), ``is_open``, perhaps ``note``."""

_LONGEST_CELL = 600


def key_table(title: str, names: Sequence[str], values: Sequence[Mapping[str, Any]], *, is_open: bool = True) -> Table:
    """A row for each key that has a value, a column for each run; nested tables become dotted keys."""
    flats = [flat(one) for one in values]
    keys = dict.fromkeys(key for one in flats for key, value in one.items() if value not in (None, [], {}))
    # Held-out rows without a name are those of "".
    rows = [[key.replace("..", "."), *(_cell(one, key) for one in flats)] for key in keys]
    return {"title": title, "head": ["", *names] if len(names) > 1 else ["", ""], "rows": rows, "is_open": is_open}


def config_tables(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[Table]:
    """What differs between the runs, where there are several; and all keys, closed."""
    whole = key_table("Configuration", names, configs, is_open=False)
    if len(names) == 1:
        return [whole]
    rows = [row for row in whole["rows"] if len(set(row[1:])) > 1 and row[0] not in ("run.dir", "wandb.name")]
    note = "" if rows else "Nothing but their directories."
    differing = {**whole, "title": "What differs in the configurations", "rows": rows, "is_open": True, "note": note}
    return [differing, whole]


def environment_tables(names: Sequence[str], environments: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The dtype ledger, and the rest of ``environment.json``."""
    ledgers = [one["dtype_ledger"] if isinstance(one.get("dtype_ledger"), Mapping) else {} for one in environments]
    rest = [{key: value for key, value in one.items() if key not in ("dtype_ledger", "start")} for one in environments]
    return [key_table("Dtypes", names, ledgers), key_table("Environment", names, rest, is_open=False)]


def change_table(starts: Sequence[Start], ends: Mapping[int, End], *, title: str) -> Table:
    """The starts of a run, what changed before each, and how and when each ended.

    Args:
        ends: by the start's number.
    """
    rows = []
    for start in starts:
        end = ends[start.number]
        changed = [f"{key}: {_text(old)} → {_text(new)}" for key, (old, new) in start.changed.items()]
        begins = [start.number, _minute(start.time), start.step, start.world_size or ""]
        rows.append([*begins, "\n".join(changed), end.text, _minute(end.time)])
    head = ["start", "time (UTC)", "from step", "ranks", "changed", "end", "ended (UTC)"]
    return {"title": title, "head": head, "rows": rows, "is_open": True}


def _minute(time: float | None) -> str:
    return "" if time is None else f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M}"


def _cell(values: Mapping[str, Any], key: str) -> str:
    return _text(values[key]) if key in values else "–"


def _text(value: Any) -> str:
    """A value as TOML has it, but a text without quotes."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]}…"
