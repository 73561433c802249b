# A small Qwen3 on the text of the Python standard library, for any CPU: what `make train` runs.
# Measured: see LOG.md (2 CPU cores).
out_dir = "out-quickstart"
dataset = "quickstart"
device = "cpu"
dtype = "float32"
compile = False
peak_tflops = "measure"  # a CPU has no datasheet peak; a measured GEMM rate gives a utilization all the same

arch_preset = "qwen3"
n_layer = 4
n_head = 4
num_key_value_heads = 2
n_embd = 192
d_ff = 512
vocab_size = 4096
block_size = 128

batch_size = 16
max_iters = 300
learning_rate = 2e-3
min_lr = 2e-4
eval_interval = 100
eval_iters = 10
eval_at_start = True
