# Qwen3-4B: 4,022,468,096 parameters, the published number; 388,956,160 are the tied embedding.
# Source: https://huggingface.co/Qwen/Qwen3-4B-Base/blob/main/config.json
# GPU: one or more with 94 GB or more, from the H100 NVL on, by the estimate of memory. Unmeasured.
out_dir = "out-qwen3-4b"
dataset = "slimpajama_6b_qwen3"

arch_preset = "qwen3"
n_layer = 36
n_head = 32
num_key_value_heads = 8  # query heads share key/value heads in groups of 4
n_embd = 2560
head_dim = 128  # the query heads together are 4,096 wide
d_ff = 9728
vocab_size = 151936  # the published padded size; <|endoftext|> is id 151643
weight_tying = True
block_size = 4096  # the model is published for up to 32,768

batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 1_048_576  # 256 sequences

warmup_iters = 2000
lr_decay_iters = 25000
