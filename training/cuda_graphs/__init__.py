"""Captures the step as a CUDA graph, and checks it before it is trusted. It may import checkpoints/ and
everything below it.
"""
