"""Other programs that train our model, one module each; bench.peer runs them, and bench.throughput beside
train.py. May import training/ and what is below it."""
