"""This process among others: ranks, console, exit statuses, the lock on out_dir, redaction, memory and time.
It may import configuration/ and everything below it.
"""
