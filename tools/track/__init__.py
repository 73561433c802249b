"""Sends a run record to experiment trackers: each figure once, while the run goes on or afterwards."""
