# nanoGPT's small GPT on characters of Shakespeare: 10.6 M parameters.
# nanoGPT publishes a best validation loss of 1.4697. GPU: any; on a CPU add --device=cpu --dtype=float32.
# Needs: python data/shakespeare_char/prepare.py. Measured 2026-11-21, one H200: 1.4303 in 80 s (LOG.md).
out_dir = "out-shakespeare-char"
dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
vocab_size = 65
block_size = 256
dropout = 0.2

batch_size = 64
max_iters = 5000
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 100
lr_decay_iters = 5000
beta2 = 0.99  # few tokens per iteration

eval_interval = 250
eval_iters = 200
eval_batch_size = 64
always_save_checkpoint = False  # it overfits: keep the best only
