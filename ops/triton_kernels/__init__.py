"""The Triton forms of the operations, one file for each and named like it: ops/X.py states what is computed,
triton_kernels/X.py computes it on a GPU. A wrapper has the name of the plain form with triton_ before it.
adamw.py alone has no such file: the plain form of the optimizer's update is torch's.

Each kernel reads its inputs and writes its outputs once, which compiled PyTorch did not (LOG.md). It computes
in fp32, whatever its tensors are stored in, and adds in a fixed order. Wrappers expect contiguous tensors.
launch.py decides how many programs start where the number is free.

Imports torch and triton, and nothing else of the project.
"""
