# Continued pretraining of Qwen3-1.7B-Base (1,720,574,976 parameters, tied) on 4,096 tokens: the published
# precision study's run (row 1 of its table: fp32 weights, bf16 computation), with documents that do not see
# each other.
# GPU: one with 140 GB or more; the study used one B200. Measured: unmeasured.
# TRAINING_GUIDE.md, "Continued pretraining", has the commands; docs/data.md says how to make the data.
#
# The study's text says one epoch; its code made 4: 2,776 iterations of 32 sequences out of 22,206. What
# differs (8 sequences that validate are one iteration less):
# - weight decay is on matrices only; there it was on all weights, also those of the norms
# - the loss is the mean of all 32 sequences of an iteration; there it was that of the last 8
# - the warm-up begins at 1/101 of the rate, there at 0; another order of the samples, cut anew each epoch
# - there was no validation; here 0.1 % of the samples validate
out_dir = "out-cpt-qwen3-1.7b-4096"
dataset = "mds"
init_weights = "hf:Qwen/Qwen3-1.7B-Base"  # says the model's shape, so no key of the model is here

# data: each sample of the shards lists the lengths of its documents
block_size = 4096
doc_masking = True

batch_size = 8
gradient_accumulation_steps = 4  # 131,072 tokens on one GPU, as published; 1 on four
use_dataloader = True
seed = 42

max_epochs = 4
learning_rate = 2e-5
min_lr = 0.0
warmup_iters = 100
lr_schedule = "wsd"
wsd_decay_shape = "cosine"
weight_decay = 0.01
beta2 = 0.999

eval_interval = 250
trackers = "wandb"
wandb_project = "cpt-qwen3-1.7b"
