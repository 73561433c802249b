"""Number formats and scales of recipes: what each computes, to the bit. The rule of ops/quantization/ holds:
pure functions of tensors in plain PyTorch, which are the reference for kernels. Imports torch and ops/.
"""
