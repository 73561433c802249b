# Qwen3 architecture for a node of B200s: 1,830,395,904 parameters.
# GPU: eight B200 (180 GB). Unmeasured.
# 4,194,304 tokens per iteration, as phase 1 of the published guide (64 x 4 on 8 GPUs there), in micro-batches
# that fit without recomputation.
out_dir = "out-qwen3-1.8b-b200"
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
tokens_per_iter = 4_194_304  # 2,048 sequences
use_dataloader = True
dataloader_num_workers = 16

warmup_iters = 2000
lr_decay_iters = 25000
