# Qwen3-0.6B: 596,049,920 parameters, the published number; 155,582,464 are the tied embedding.
# Source: https://huggingface.co/Qwen/Qwen3-0.6B-Base/blob/main/config.json
# GPU: one or more with 24 GB or more, from the RTX 4090 on, by the estimate of memory. Unmeasured.
out_dir = "out-qwen3-0.6b"
dataset = "slimpajama_6b_qwen3"

arch_preset = "qwen3"
n_layer = 28
n_head = 16
num_key_value_heads = 8  # query heads share key/value heads in groups of 2
n_embd = 1024
head_dim = 128  # the query heads together are 2,048 wide
d_ff = 3072
vocab_size = 151936  # the published padded size; <|endoftext|> is id 151643
weight_tying = True
block_size = 4096  # the model is published for up to 32,768

batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 1_048_576  # 256 sequences

warmup_iters = 2000
lr_decay_iters = 25000
