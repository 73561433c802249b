"""Makes a run record into a file that a stranger can check: digests, and the MFU counted again.

python -m tools.seal out-quickstart/run_20260101_120000.json
python -m tools.seal --verify seal_20260101_120000.json
python -m tools.replay seal_20260101_120000.json
"""
