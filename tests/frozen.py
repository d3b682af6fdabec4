"""The last of what the server of forks imports: a million objects of torch and transformers are garbage to nobody.

Else each full collection in a fork would walk them, and copy their pages.
"""

from __future__ import annotations

import gc

gc.freeze()
