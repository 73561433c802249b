# LLaMA 2 architecture: 1,294,159,104 parameters; 84.72 B tokens for 1.36e21 FLOPs as published.
# GPU: one or more with 48 GB or more, such as RTX A6000, H100, H200 and B200, by the estimate of memory.
# Measured 2026-11-23, one H200, torch 2.11, 16 x 2048 tokens, 4 accumulation steps: MFU 61.95 % (v3),
# 73,483 tokens/s, 65.0 GiB peak (docs/benchmarks.md).
out_dir = "out-llama-1.36b"
dataset = "slimpajama_6b_llama"

arch_preset = "llama"
n_layer = 18
n_head = 18
n_embd = 2304
d_ff = 6144
vocab_size = 32000
block_size = 2048

# batch: the same tokens per iteration on every number and size of GPUs that can divide and hold them
batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 786_432  # 384 sequences

warmup_iters = 2000
lr_decay_iters = 25000
