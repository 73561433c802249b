# LLaMA 2 architecture for a node of B200s: 1,294,159,104 parameters.
# GPU: B200 (180 GB). Unmeasured.
out_dir = "out-llama2-1.36b-b200"
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
