"""The captured step, and the gate that it passes before it is trusted. It may import checkpoints/ and
everything below it.
"""
