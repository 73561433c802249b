# Llama 3.2 1B: 1,235,814,400 parameters, the published number; 262,668,288 are the tied embedding.
# Source: https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
# GPU: one or more with 32 GB or more, from the RTX 5090 on, by the estimate of memory. Unmeasured.
# rope_scaling is part of the published model, and acts at every length.
out_dir = "out-llama3.2-1b"
dataset = "slimpajama_6b_llama3"

arch_preset = "llama3"
n_layer = 16
n_head = 32
num_key_value_heads = 8  # query heads share key/value heads in groups of 4
n_embd = 2048
d_ff = 8192
vocab_size = 128256
rope_scaling = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
weight_tying = True
block_size = 4096  # the model is published for up to 131,072

batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 1_048_576  # 256 sequences

warmup_iters = 2000
lr_decay_iters = 25000
