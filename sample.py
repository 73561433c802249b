"""Generates text from a run's checkpoint, or from weights in Hugging Face's format.

    python sample.py --out_dir=out-quickstart --prompt="def main(" --num_samples=2
    python sample.py --hf=exported --prompt="Once upon a time"

It samples token by token through the whole model, without a key/value cache: made to look at a model, not to
serve it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from common.arguments import real_number, user_path, whole_number
from common.command import run_command
from common.errors import UserError
from common.text import plain
from data.pipeline.meta_file import load_tokenizer
from data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from model import Transformer
from training.checkpoints.loading import load_model
from training.configuration.dataset_name import dataset_folder, parse_dataset
from training.configuration.keys import TrainConfig
from training.pretrained.folder import PREFIX
from training.pretrained.reading import load_pretrained

TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-3, 1e3  # logits divided by it stay numbers in float32


def main(argv: list[str]) -> None:
    options = parse(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, tokenizer, about = load_hf(options, device) if options.hf else load_run(options, device)
    model.eval()
    prompt = tokenizer.encode(options.prompt)
    if not prompt:
        raise UserError("--prompt is empty; give at least one character")
    print(about)
    generator = torch.Generator(device).manual_seed(options.seed)
    for number in range(1, options.num_samples + 1):
        ids = torch.tensor([prompt], device=device)
        ids = generate(model, ids, options.max_new_tokens, options.temperature, options.top_k, generator)
        print(f"--- sample {number} ---\n{tokenizer.decode(ids[0].tolist())}", flush=True)


def load_run(options: argparse.Namespace, device: torch.device) -> tuple[Transformer, Tokenizer, str]:
    """The model of a checkpoint, the tokenizer of its dataset, and what is printed about them."""
    checkpoint, saved, model = load_model(Path(options.out_dir), options.checkpoint, device)
    dataset, *_ = parse_dataset(options.dataset or saved.config["dataset"])  # a mixture has one tokenizer
    tokenizer = load_tokenizer(dataset_folder(TrainConfig(dataset=dataset)))
    about = f"checkpoint {checkpoint}, iteration {saved.iteration}, validation loss {saved.val_loss}"
    return model, tokenizer, about


def load_hf(options: argparse.Namespace, device: torch.device) -> tuple[Transformer, Tokenizer, str]:
    """The same of weights in Hugging Face's format."""
    source = options.hf if options.hf.startswith(PREFIX) else f"{PREFIX}{options.hf}"
    weights, model = load_pretrained(source, device)
    tokenizer = open_tokenizer(str(weights.folder))
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer in {weights.folder} has {tokenizer.vocab_size:,} ids, the model "
            f"{model.config.vocab_size:,}; one of them is from another model"
        )
    return model, tokenizer, f"weights {weights.folder}"


@torch.no_grad()
def generate(model, ids, count: int, temperature: float, top_k: int, generator) -> torch.Tensor:
    """Extends ids (1, T) by count tokens; temperature 0 takes the most likely one. Returns (1, T + count)."""
    for _ in range(count):
        window = ids[:, -model.config.block_size :]
        logits = model(window)[:, -1].float()  # (1, V)
        if temperature == 0:
            chosen = logits.argmax(dim=-1, keepdim=True)
        else:
            if top_k:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, float("-inf"))
            chosen = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        ids = torch.cat((ids, chosen), dim=1)
    return ids


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate text from a run's checkpoint or other weights.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--out_dir", type=user_path, help="the run's out_dir")
    model.add_argument(
        "--hf", type=user_path, help="weights in Hugging Face's format: FOLDER or OWNER/NAME[@REVISION]"
    )
    parser.add_argument(
        "--checkpoint", default="latest", help="latest, best, or a name such as step-00001000"
    )
    parser.add_argument("--prompt", default="\n")
    parser.add_argument("--num_samples", type=whole_number(1), default=1)
    parser.add_argument("--max_new_tokens", type=whole_number(1), default=200)
    hottest = real_number(0, TEMPERATURE_MAX)
    parser.add_argument("--temperature", type=hottest, default=0.8, help="0: always the most likely token")
    parser.add_argument("--top_k", type=whole_number(0), default=200, help="the k most likely; 0: all")
    parser.add_argument("--seed", type=whole_number(0), default=1337)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--dataset", type=user_path, help="a name in data/ or a path, if it has moved since training"
    )
    options = parser.parse_args(argv)
    if 0 < options.temperature < TEMPERATURE_MIN:
        parser.error(f"--temperature must be 0 or at least {TEMPERATURE_MIN}, got {options.temperature}")
    if plain(options.prompt) != options.prompt:
        parser.error("--prompt has a control character, or is no UTF-8")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda, but torch finds no CUDA GPU; use --device=cpu")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
