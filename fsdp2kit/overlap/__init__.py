"""The overlap report: how much of a traced step is compute, communication, and communication that nothing hides.

`trace` reads every rank's file, `events` says what its events mean, `split` divides a step, `report` gathers the
figures and what to try, `display` shows them.
"""
