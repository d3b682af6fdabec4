"""The day that chat templates write: that on which the run first began, on every rank and after every resume.

Templates of Llama 3.2, gpt-oss, SmolLM3 and others ask for today's date. Ranks would differ around midnight, and a run
that is resumed on another day would have other tokens than its checkpoint.
"""

from __future__ import annotations

import json
import re
import time
from datetime import date, datetime
from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from fsdp2kit.job.distributed import gather_objects
from fsdp2kit.job.events import began
from fsdp2kit.model.tokenizer import notes_of

_FUNCTION = "strftime_now"  # transformers' name of it
_CALL = re.compile(_FUNCTION + r"""\(\s*(["'])(.*?)\1\s*\)""")


def settle_day(tokenizer: Tokenizer | None, run_dir: Path) -> None:
    """Give a tokenizer the day on which the run first began, if its template writes one. Collective."""
    if tokenizer is not None and writes_date(tokenizer):
        seconds = gather_objects(began(run_dir) or time.time())[0]
        notes_of(tokenizer).day = datetime.fromtimestamp(seconds).date()


def writes_date(tokenizer: Tokenizer) -> bool:
    """Whether the chat template asks for the date."""
    return _FUNCTION in str(tokenizer.chat_template)


def day_of(tokenizer: Tokenizer) -> date:
    """The day that the chat template writes: `settle_day`'s, else today."""
    return notes_of(tokenizer).day or datetime.now().date()


def dated(template: str, tokenizer: Tokenizer) -> str:
    """A template with the day in place of its calls for the date; at midnight, so that no text depends on the hour.

    A function cannot be handed to the template: transformers makes texts of its variables.
    """
    midnight = datetime.combine(day_of(tokenizer), datetime.min.time())
    return _CALL.sub(lambda call: json.dumps(midnight.strftime(call[2])), template)
