# GPT-2 architecture at LLaMA 1.36B's width and depth: 1,267,322,112 parameters.
# GPU: one or more with 48 GB or more, such as RTX A6000, H100, H200 and B200, by the estimate of memory.
# Measured 2026-11-23, one H200, torch 2.11, 16 x 2048 tokens, 4 accumulation steps: MFU 61.80 % (v3),
# 71,148 tokens/s, 65.6 GiB peak (docs/benchmarks.md).
out_dir = "out-gpt2-1.36b"
dataset = "slimpajama_6b_gpt2"

n_layer = 18
n_head = 18
n_embd = 2304
d_ff = 9216
vocab_size = 50304  # GPT-2's 50,257 padded to a multiple of 64
block_size = 2048
bias = False

# batch: the same tokens per iteration on every number and size of GPUs that can divide and hold them
batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 524_288  # 256 sequences

warmup_iters = 2000
lr_decay_iters = 25000
