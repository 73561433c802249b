"""Knows what fits: the memory that a run needs on each GPU, item by item, what known GPUs have, and the
numbers in place of 'auto'. It may import what stands below it.
"""
