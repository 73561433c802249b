"""Makes a run record into a file that a stranger can check: digests, and the MFU counted again."""
