# Smoke test of the llama3 architecture on a CPU: smoke_gpt2.py with another model.
# Needs the embedded corpus: python data/quickstart/prepare.py. Measured: unmeasured.
from config.smoke_gpt2 import *  # noqa: F403

out_dir = "out-smoke-llama3"
arch_preset = "llama3"
num_key_value_heads = 2
d_ff = 352
