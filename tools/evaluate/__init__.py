"""Says what a model is worth: perplexity and bits per byte of held-out text, and benchmarks of lm-eval."""
