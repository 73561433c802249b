"""Says what a budget buys: the compute-optimal model for a number of FLOPs or GPU-hours, and its loss by a
scaling law. It may import training/ and plots/ and everything below them.
"""
