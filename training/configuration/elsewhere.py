"""What users of other programs type, and what it is here: the hints of errors."""

from __future__ import annotations

from pathlib import Path

NANOCHAT, LITGPT, TORCHTITAN = "nanochat", "litgpt", "torchtitan"
SIZE = "n_layer, n_head and n_embd; python -m tools.plan --arch=qwen3 --size=1e9 prints them for a size"
# {flag: (program, what it is here)}
FLAGS = {
    "depth": (NANOCHAT, SIZE),
    "device_batch_size": (NANOCHAT, "batch_size"),
    "total_batch_size": (NANOCHAT, "tokens_per_iter, with batch_size='auto'"),
    "max_seq_len": (NANOCHAT, "block_size"),
    "num_iterations": (NANOCHAT, "max_iters"),
    "eval_every": (NANOCHAT, "eval_interval"),
    "run": (NANOCHAT, "wandb_run_name, with trackers='wandb'"),
    "train.global_batch_size": (LITGPT, "tokens_per_iter, in tokens, with batch_size='auto'"),
    "train.micro_batch_size": (LITGPT, "batch_size"),
    "train.max_tokens": (LITGPT, "max_iters, in iterations of tokens_per_iter"),
    "train.max_seq_length": (LITGPT, "block_size"),
    "model_name": (LITGPT, "a file of config/, or arch_preset with " + SIZE),
    "training.local_batch_size": (TORCHTITAN, "batch_size"),
    "training.global_batch_size": (TORCHTITAN, "tokens_per_iter, in tokens, with batch_size='auto'"),
    "training.seq_len": (TORCHTITAN, "block_size"),
    "training.steps": (TORCHTITAN, "max_iters"),
    "optimizer.lr": (TORCHTITAN, "learning_rate"),
    "parallelism.data_parallel_shard_degree": (TORCHTITAN, "use_fsdp=True, over all processes"),
    "job.config_file": (TORCHTITAN, "the config file alone: python train.py config/FILE.py"),
}
FAMILIES = {"training": TORCHTITAN, "parallelism": TORCHTITAN, "job": TORCHTITAN, "train": LITGPT}
GPT2 = "nanoGPT's; here real weights are init_weights='hf:openai-community/{}', with init_from='scratch'"
VALUES = {
    **{("init_from", f"gpt2{size}"): GPT2.format(f"gpt2{size}") for size in ("", "-medium", "-large", "-xl")},
    ("device", "mps"): "not supported: training runs on CUDA GPUs or on the CPU; on a Mac: --device=cpu "
    "--dtype=float32 --compile=False",
}


def flag_hint(name: str) -> str:
    """What an error about an unknown flag ends with; '' if no other program has it."""
    if name in FLAGS:
        return f", which is {FLAGS[name][0]}'s; here: {FLAGS[name][1]}"
    program = FAMILIES.get(name.partition(".")[0]) if "." in name else None
    return f", which looks like {program}'s; python train.py --help lists every key" if program else ""


def foreign_checkpoint(out_dir: Path) -> str:
    """What an error about a folder without our checkpoints ends with, if another program's is there."""
    if not (out_dir / "ckpt.pt").is_file():
        return ""
    return (
        f". {out_dir / 'ckpt.pt'} is nanoGPT's, which this program does not read: sample it there, or save "
        "it in Hugging Face's format (transformers: GPT2LMHeadModel.save_pretrained) and start with "
        "--init_weights=hf:FOLDER"
    )
