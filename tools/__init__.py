"""Commands that work on what a run has left: one file each."""
