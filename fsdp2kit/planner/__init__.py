"""What a run needs, before it is started: memory by phase and category, bytes sent, time. See docs/dev/memory.md.

activations.py (what a layer keeps; count.py for unusual layers) and sizes.py (units, state) → memory.py (one step,
moment by moment) → communication.py (bytes sent) and speed.py (time) → estimate.py (all of it, for a config) →
search.py (what to change) and report.py (text, JSON, pictures).
"""
