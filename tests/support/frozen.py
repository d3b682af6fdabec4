"""The last import of the fork server: it freezes the garbage collector.

Otherwise every full collection in a fork would visit a million objects of torch and transformers, and copy their
pages.
"""

from __future__ import annotations

import gc

import datasets
import pandas
import peft
import rich.console
from transformers import get_scheduler

# Runs import these later, for up to a second each: pyarrow checks whether rows come from pandas.
IMPORTED_LATER = (datasets, pandas, peft, rich.console, get_scheduler)

gc.freeze()
