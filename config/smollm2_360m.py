# SmolLM2-360M: 361,821,120 parameters, the published number; 47,185,920 are the tied embedding.
# Source: https://huggingface.co/HuggingFaceTB/SmolLM2-360M/blob/main/config.json
# GPU: one or eight with 140 GB, such as H200; 67.8 GiB estimated on one. Unmeasured.
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

batch_size = 16
gradient_accumulation_steps = 2  # 1,048,576 tokens per iteration on 8 GPUs

warmup_iters = 2000
lr_decay_iters = 25000
