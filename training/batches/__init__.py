"""Makes batches from token files: checks of a dataset, its files as one sequence, token windows, packing,
mixtures, the loader. It may import hardware/ and everything below it.
"""
