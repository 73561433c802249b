"""Commands around a run: one file or package each."""
