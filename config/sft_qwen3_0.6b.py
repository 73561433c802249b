# Fine-tuning of Qwen3-0.6B (596,049,920 parameters, tied) on conversations, all weights: docs/chat.md.
# GPU: one with 24 GB or more, by the estimate of memory. Unmeasured with the published weights.
# Needs: conversations in the tokenizer and the chat template of the same folder, by data/chat/prepare.py.
out_dir = "out-sft"
dataset = "chat"
init_weights = "hf:Qwen/Qwen3-0.6B"  # says the model's shape, so no key of the model is here

# only what the assistant writes is learned; whole conversations share a window and do not see each other
block_size = 2048
packing = "truncate"
doc_masking = True

batch_size = "auto"
gradient_accumulation_steps = "auto"
tokens_per_iter = 32_768  # 16 windows

max_epochs = 3
learning_rate = 1e-5
min_lr = 1e-6
warmup_iters = 20
weight_decay = 0.0
eval_interval = 50
eval_iters = 20
eval_at_start = True
