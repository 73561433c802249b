# The plain 124M model of the reference experiment (docs/time_to_loss.md): Qwen3, 12 blocks of width 768.
# GPU: one with 24 GB or more. Measured 2026-11-27: 521,000 to 539,000 tokens/s on an H100, 15.6 GiB.
#
#   python -m bench.time_to_loss
out_dir = "out-speedrun-124m"
dataset = "fineweb10b"

arch_preset = "qwen3"
d_ff = 2048
vocab_size = 50304  # GPT-2's 50,257, padded to a multiple of 64
weight_tying = True

batch_size = 32
gradient_accumulation_steps = "auto"
tokens_per_iter = 65_536
use_cuda_graphs = True  # in fp8, 1.37 times as fast: the GPU would wait for the host
max_iters = 640  # 41.9 M tokens

learning_rate = 1e-3
min_lr = 0.0
lr_schedule = "wsd"
wsd_decay_fraction = 0.25
warmup_iters = 40

eval_interval = 40
eval_batch_size = 32
eval_iters = 44  # at most 1.44 M tokens: all windows of a small held-out part, then equal for every seed
always_save_checkpoint = False
