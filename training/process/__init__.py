"""Manages this process among the others: ranks, console, exit statuses, the lock on out_dir, redaction,
memory and time. It may import configuration/ and everything below it.
"""
