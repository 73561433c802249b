"""Commands that work on what a run has left: one file each, started as `python -m tools.NAME`."""
