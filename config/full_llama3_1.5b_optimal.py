# LLaMA 3 architecture: 1,544,628,224 parameters; 101.909 B tokens for 1.36e21 FLOPs as published.
# GPU: one or more with 48 GB or more, such as RTX A6000, H100, H200 and B200, by the estimate of memory.
# Measured 2026-11-23, one H200, torch 2.11, 16 x 2048 tokens, 4 accumulation steps: MFU 61.93 % (v3),
# 71,267 tokens/s, 73.8 GiB peak (docs/benchmarks.md).
out_dir = "out-llama3-1.5b-optimal"
dataset = "slimpajama_6b_llama3"

arch_preset = "llama3"
n_layer = 18
n_head = 16
num_key_value_heads = 8  # query heads share key/value heads in groups of 2
n_embd = 2048
d_ff = 7168
vocab_size = 128256
block_size = 2048

# batch: the same tokens per iteration on every number and size of GPUs that can divide and hold them
batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 786_432  # 384 sequences

warmup_iters = 2000
lr_decay_iters = 25000
