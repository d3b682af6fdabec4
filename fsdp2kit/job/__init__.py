"""A job: its ranks and groups, how they meet and end, hosts, the run directory, events, progress."""
