"""The last of what the server of forks imports.

A million objects of torch and transformers are garbage to nobody: else each full collection in a fork would walk them,
and copy their pages.
"""

from __future__ import annotations

import gc

import pandas
import peft
from transformers import get_scheduler

IMPORTED_LATER = (pandas, peft, get_scheduler)  # by runs, a second each: pyarrow looks whether rows come from pandas

gc.freeze()
