"""The job: turn text into token ids and back, with the ids that a model's own tokenizer gives.

May import data/errors.py, data/folders.py and data/huggingface.py; never data/pipeline/ or the training side.
"""
