# SmolLM2-360M: 361,821,120 parameters, the published number; 47,185,920 are the tied embedding.
# Source: https://huggingface.co/HuggingFaceTB/SmolLM2-360M/blob/main/config.json
# GPU: one or more with 24 GB or more, from the RTX 4090 on, by the estimate of memory. Unmeasured.
# Its tokenizer has 49,152 ids, and no folder in data/ uses it. Make a dataset of your text with
# data/text/prepare.py --tokenizer hf:HuggingFaceTB/SmolLM2-360M --output data/smollm2.
out_dir = "out-smollm2-360m"
dataset = "smollm2"

arch_preset = "llama"
n_layer = 32
n_head = 15
num_key_value_heads = 5  # query heads share key/value heads in groups of 3
n_embd = 960
d_ff = 2560
vocab_size = 49152
rope_theta = 100000.0
weight_tying = True
block_size = 4096  # the model is published for up to 8,192

batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 1_048_576  # 256 sequences

warmup_iters = 2000
lr_decay_iters = 25000
