# Qwen2.5-1.5B: 1,543,714,304 parameters, the published number; 233,373,696 are the tied embedding.
# Source: https://huggingface.co/Qwen/Qwen2.5-1.5B/blob/main/config.json
# GPU: one or more with 40 GB or more, from the A100-40GB on, by the estimate of memory. Unmeasured.
# Its tokenizer is Qwen3's without four special tokens, so the same dataset serves both.
out_dir = "out-qwen2.5-1.5b"
dataset = "slimpajama_6b_qwen3"

arch_preset = "qwen2"
n_layer = 28
num_key_value_heads = 2  # query heads share key/value heads in groups of 6
n_embd = 1536
d_ff = 8960
vocab_size = 151936  # the published padded size; <|endoftext|> is id 151643
weight_tying = True
block_size = 4096  # the model is published for up to 32,768

batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 1_048_576  # 256 sequences

warmup_iters = 2000
lr_decay_iters = 25000
