"""Says what a model is worth: benchmarks of lm-eval, and perplexity and bits per byte of held-out text. Each
rank has a whole model and takes its share of the sequences."""
