# Qwen3-1.7B: 1,720,574,976 parameters, the published number; 311,164,928 are the tied embedding.
# Source: https://huggingface.co/Qwen/Qwen3-1.7B-Base/blob/main/config.json
# GPU: one or more with 40 GB or more, from the A100-40GB on, by the estimate of memory.
# Measured 2026-11-23 with --doc_masking=True, 8 x 4096 x 4, H200, torch 2.11: 53,439 tokens/s, 100.1 GiB.
out_dir = "out-qwen3-1.7b"
dataset = "slimpajama_6b_qwen3"

arch_preset = "qwen3"
n_layer = 28
n_head = 16
num_key_value_heads = 8  # query heads share key/value heads in groups of 2
n_embd = 2048
d_ff = 6144
vocab_size = 151936  # the published padded size; <|endoftext|> is id 151643
weight_tying = True
block_size = 4096  # the model is published for up to 32,768

batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 1_048_576  # 256 sequences

warmup_iters = 2000
lr_decay_iters = 25000
