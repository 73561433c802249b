"""Turns text into token ids and back, with the ids that a model's own tokenizer gives.

May import data/folders.py, data/huggingface.py and common/; never data/pipeline/ or the training side.
"""
