"""Number formats and scales of low-precision training: what each recipe computes, to the bit.

The rule: these are pure functions of tensors in plain PyTorch, without modules, autograd and settings. They
run on a CPU and are the reference for kernels that compute the same. Nothing here raises because of a number
in a tensor, since looking at it would make the host wait for the GPU: each function says what it does with
nan and inf.

Imports torch, and of the project its own files alone.

    M rows · K columns · L updates in a history · n tensors
"""
