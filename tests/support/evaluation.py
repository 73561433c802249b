"""A tiny model with a tokenizer of characters, texts, and task files of lm-eval, for the tests of
tools.evaluate. Nothing needs the network."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from support.hf_models import VOCAB, change_config, save

from data.pipeline.meta_file import describe
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.json_file import added_token
from data.tokenizers.to_file import write_tokenizer
from data.tokenizers.tokenizer import keep_tokenizer, open_tokenizer
from tools import evaluate

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
EOT = "<|endoftext|>"
EOT_ID = VOCAB - 1
# 63 characters, é of two bytes
CHARS = "\n .,?é" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + "01234"
# one shorter than the model's context of 64, one of about three contexts, and one of a single character
TEXTS = ["Where is the café?", "".join(CHARS[(i * i * 7 + i // 3) % 63] for i in range(200)), "A"]


def make_weights(folder: Path, name: str = "qwen3", begins: bool = False) -> Path:
    """Random weights in Hugging Face's format with this tokenizer. begins: it puts its special token before
    every text, as LLaMA's does."""
    change_config(save(name, folder), bos_token_id=EOT_ID, eos_token_id=EOT_ID)
    (folder / "generation_config.json").unlink()  # which names another one
    write_tokenizer(folder, CharTokenizer(CHARS), None)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [added_token(EOT_ID, EOT)]
    if begins:
        sequence = [{"SpecialToken": {"id": EOT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {EOT: {"id": EOT, "ids": [EOT_ID], "tokens": [EOT]}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": sequence,
            "pair": sequence,
            "special_tokens": special,
        }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    token = {"eos_token": EOT, **({"bos_token": EOT} if begins else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | token))
    return folder


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_token_files(folder: Path, tokenizer_folder: Path, texts: list[str]) -> Path:
    """A dataset whose validation split is these texts, each before an end-of-text token."""
    folder.mkdir()
    tokenizer, files = open_tokenizer(str(tokenizer_folder)), {}
    ids = [number for text in texts for number in (*tokenizer.encode(text), EOT_ID)]
    for split, tokens in {"train": ids[::-1] * 20, "val": ids}.items():
        path = folder / f"{split}.bin"
        np.array(tokens, "<u2").tofile(path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        files[path.name] = {"tokens": len(tokens), "sha256": sha256, "max_id": max(tokens)}
    meta = describe(VOCAB, keep_tokenizer(folder, tokenizer), EOT_ID, "test", files)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def figures(*argv: object, output: Path, device: str = "cpu") -> dict:
    """The JSON that `python -m tools.evaluate` writes, on one thread of this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        before = set(output.glob("evaluate_*.json"))
        evaluate.main([*map(str, argv), f"--output={output}", f"--device={device}"])
    finally:
        torch.set_num_threads(threads)
    (path,) = set(output.glob("evaluate_*.json")) - before
    return json.loads(path.read_text())


# --- task files of lm-eval ---

QUESTIONS = [
    {"question": f"What is {n} plus one?", "choices": [" one", " two it is", " three", " A"], "answer": n % 4}
    for n in range(5)
]
TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "tiny_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["q"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def make_tasks(folder: Path) -> Path:
    """A YAML file of each task, and its examples. JSON is YAML."""
    folder.mkdir()
    examples = folder / "questions.jsonl"
    examples.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    texts = write_texts(folder / "texts.jsonl", TEXTS)
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(texts if name == "tiny_text" else examples)}}
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task, "metadata": {"version": 1.5}}))
    return folder
