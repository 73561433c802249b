"""From token files to batches: checks of a dataset, its files as one sequence, windows, packing, mixtures,
the loader. It may import hardware/ and everything below it.
"""
