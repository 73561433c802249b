"""Differentiable operations of the model: their plain forms, their Triton kernels, fp8, and what a recipe is.

The rule: an operation's file states it in plain PyTorch, which runs on a CPU and on the meta device, where
FLOPs are counted. What that costs too much memory traffic on a GPU has a second form of the same noun in
ops/triton_kernels/, and the operation calls it there. tests/unit/test_ops.py and test_float8.py beside it
compare the two. model.py calls an operation and does not know which form runs: plain or Triton, bf16 or fp8.

Imports torch and nothing of the project. An operation imports its kernels inside the function that runs on a
GPU, since a CPU's PyTorch comes without Triton; kernels import no operations.

    B batch · T sequence · C model width · H query heads · K key/value heads · D head width
    F feed-forward width · V vocabulary · N tokens, B times T of them; M where N is a width
"""
