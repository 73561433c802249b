# A small Qwen3 on your own text, on one GPU: data/text/prepare.py prints the flags for a text of your size.
# Needs: python data/quickstart/prepare.py, or your own text. Unmeasured.
out_dir = "out-own-text"
dataset = "quickstart"

arch_preset = "qwen3"
n_layer = 4
n_head = 4
num_key_value_heads = 2
n_embd = 192
d_ff = 512
vocab_size = 4096

batch_size = "auto"  # what fits into the GPU's memory
gradient_accumulation_steps = "auto"
tokens_per_iter = 16_384
max_iters = 600
learning_rate = 2e-3
min_lr = 1e-4
eval_interval = 100
eval_iters = 10
eval_at_start = True
