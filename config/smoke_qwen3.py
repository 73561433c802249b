# Smoke test of the qwen3 architecture on a CPU: smoke_gpt2.py with another model.
# Needs the embedded corpus: python data/quickstart/prepare.py. Measured: unmeasured.
from config.smoke_gpt2 import *  # noqa: F403

out_dir = "out-smoke-qwen3"
arch_preset = "qwen3"
num_key_value_heads = 2
d_ff = 352
