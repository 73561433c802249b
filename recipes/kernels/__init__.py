"""The Triton forms of recipes' operations, as in ops/triton_kernels/. Imports torch, triton and ops/."""
