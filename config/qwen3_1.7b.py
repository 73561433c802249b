# Qwen3-1.7B: 1,720,574,976 parameters, the published number; 311,164,928 are the tied embedding.
# Source: https://huggingface.co/Qwen/Qwen3-1.7B-Base/blob/main/config.json
# GPU: one or eight with 140 GB, such as H200; 100.1 GiB estimated on one. Measured 2026-11-23 with
# --doc_masking=True on one H200, torch 2.11: 53,439 tokens/s, 100.1 GiB.
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

batch_size = 8
gradient_accumulation_steps = 4  # 1,048,576 tokens per iteration on 8 GPUs

warmup_iters = 2000
lr_decay_iters = 25000
