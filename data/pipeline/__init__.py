"""Turns raw text into the token files and the meta.json of a dataset, at any size.

May import data/tokenizers/ and the files directly in data/ that are no commands; never the training side.
"""
