"""The last of what the server of forks imports.

A million objects of torch and transformers are garbage to nobody: else each full collection in a fork would walk them,
and copy their pages.
"""

from __future__ import annotations

import gc

import datasets
import pandas
import peft
import rich.console
from transformers import get_scheduler

# By runs, up to a second each: pyarrow looks whether rows come from pandas.
IMPORTED_LATER = (datasets, pandas, peft, rich.console, get_scheduler)

gc.freeze()
