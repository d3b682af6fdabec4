"""What a run needs, before it is started: memory by phase and category, bytes sent, time. See docs/memory.md.

activations.py (what a layer keeps) → memory.py (one step, moment by moment) → communication.py (what ranks send,
how long it takes) → estimate.py (all of it, for a config) → search.py (what to change) and report.py; trace.py counts
the same on the real modules, with allocations.py.
"""
