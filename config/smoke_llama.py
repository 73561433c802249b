# Smoke test of the llama architecture on a CPU: smoke_gpt2.py with another model.
# Needs the embedded corpus: python data/quickstart/prepare.py. Measured: unmeasured.
from config.smoke_gpt2 import *  # noqa: F403

out_dir = "out-smoke-llama"
arch_preset = "llama"
d_ff = 352
