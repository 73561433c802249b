# Qwen3 architecture: 1,830,395,904 parameters; 81.727 B tokens for 1.36e21 FLOPs as published.
# GPU: one or more with 48 GB or more, such as RTX A6000, H100, H200 and B200, by the estimate of memory.
# Measured 2026-11-23, one H200, torch 2.11, 16 x 2048 tokens, 4 accumulation steps: MFU 62.20 % (v3),
# 59,619 tokens/s, 93.2 GiB peak (docs/benchmarks.md);
# with --low_precision=fp8_tensorwise 80.02 % of the bf16 peak, 76,692 tokens/s.
out_dir = "out-qwen3-1.8b-optimal"
dataset = "slimpajama_6b_qwen3"

arch_preset = "qwen3"
n_layer = 24
n_head = 16
num_key_value_heads = 8  # query heads share key/value heads in groups of 2
n_embd = 2048
d_ff = 6144
vocab_size = 151936  # the published padded size; <|endoftext|> is id 151643
block_size = 2048

# batch: the same tokens per iteration on every number and size of GPUs that can divide and hold them
batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 786_432  # 384 sequences

warmup_iters = 2000
lr_decay_iters = 25000
