"""Weights in Hugging Face's format: reads them into a run, and writes a checkpoint as such a folder. It may
import checkpoints/ and everything below it.
"""
