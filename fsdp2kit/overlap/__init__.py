"""The overlap report: what of a traced step is compute, what is communication, and what nothing hides.

`trace` reads every rank's file, `events` says what its events mean, `split` divides a step, `report` gathers the
figures and what to try, `display` shows them.
"""
