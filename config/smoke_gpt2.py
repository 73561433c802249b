# Smoke test of the gpt2 architecture on a CPU: the whole path of a run in well under a minute.
# Needs the embedded corpus: python data/quickstart/prepare.py. Measured: unmeasured.
# The other smoke_*.py are this one with another architecture.
out_dir = "out-smoke-gpt2"
dataset = "quickstart"
device = "cpu"
dtype = "float32"
compile = False

n_layer = 2
n_head = 4
n_embd = 128
d_ff = 512
vocab_size = 4096
block_size = 128

batch_size = 8
gradient_accumulation_steps = 2
max_iters = 50
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 10
lr_decay_iters = 50
eval_interval = 25
eval_iters = 4
log_interval = 5
