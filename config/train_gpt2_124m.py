# GPT-2 124M, nanoGPT's reproduction: about 0.5 M tokens per iteration on 8 GPUs.
# GPU: eight with 40 GB or more. Unmeasured.
#
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_124m.py
out_dir = "out-gpt2-124m"
dataset = "slimpajama_6b_gpt2"

vocab_size = 50304  # 50,257 padded to a multiple of 64
bias = False

gradient_accumulation_steps = 5  # per GPU: 12 x 5 x 8 x 1024 = 491,520 tokens

learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
lr_decay_iters = 600000
max_iters = 600000

eval_iters = 200
