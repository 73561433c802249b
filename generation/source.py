"""The model that makes or scores text: its weights, its tokenizer, and what is known of both.

Matrices are converted once to the dtype in which the model computes, and vectors where they are used, as in
training. Low precision (fp8, MXFP8, NVFP4) is not used: text and figures are those of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from data.pipeline.bad_records import BadRecord
from data.pipeline.conversations import ChatTemplate
from data.pipeline.dataset_tokenizer import load_tokenizer
from data.pipeline.meta_file import read_meta
from data.tokenizers.choice import EOT_NAMES
from data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from generation.cache import cached_attention
from model import Transformer
from training.batches.sources import tokenizer_identity
from training.checkpoints.loading import load_model
from training.configuration.dataset_name import first_folder
from training.configuration.dtypes import DTYPES
from training.pretrained.folder import PREFIX, read_generation
from training.pretrained.generation_settings import end_ids
from training.pretrained.reading import load_pretrained
from training.pretrained.same_tokenizer import check_recorded, check_rows
from training.strategies.replicated import is_stored_in_compute_dtype


@dataclass(frozen=True)
class Source:
    model: Transformer
    tokenizer: Tokenizer
    folder: Path  # where the tokenizer is
    ends: set[int]  # ids at which generated text ends
    eot_id: int | None  # end-of-text: the dataset's, of weights the first of `ends`
    facts: dict[str, Any]  # where the weights come from
    trained_in: dict[str, Any]  # "dtype", and of a run "low_precision"

    @property
    def about(self) -> str:
        if "weights" in self.facts:
            return f"weights {self.facts['weights']}"
        loss = self.facts["val_loss"]
        shown = "not evaluated" if loss is None else f"validation loss {loss:.4f}"
        return f"checkpoint {self.facts['checkpoint']}, iteration {self.facts['iteration']}, {shown}"


def choose_device(name: str | None) -> torch.device:
    """None: the GPU, where there is one. Raises UserError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda, but torch finds no CUDA GPU; use --device=cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_run(out_dir: Path, which: str, device: torch.device, dataset: str | None = None) -> Source:
    """A checkpoint of a run, and the tokenizer of its dataset, which may have moved to `dataset`. Raises
    UserError."""
    checkpoint, saved, model = load_model(out_dir, which, device, cached_attention)
    folder = first_folder(dataset or saved.config["dataset"])
    found = tokenizer_identity(read_meta(folder)["tokenizer"] or {})
    was, *_ = saved.data.get("sources", [saved.data])
    fix = "name the run's with --dataset of sample.py or tools.export_hf"
    check_recorded(was["tokenizer"], str(checkpoint), found, str(folder), fix)
    ends, eot_id = set(end_ids(saved.pretrained or {}, was.get("eot_id"))), was.get("eot_id")
    facts = {"checkpoint": str(checkpoint), "iteration": saved.iteration, "val_loss": saved.val_loss}
    facts["run"], low = saved.run, saved.config.get("low_precision", "none")
    trained_in = {"dtype": saved.config.get("dtype"), "low_precision": low}
    return Source(model, load_tokenizer(folder), folder, ends, eot_id, facts, trained_in)


def load_weights(name: str, device: torch.device) -> Source:
    """Weights in Hugging Face's format: FOLDER or OWNER/NAME[@REVISION]. Raises UserError."""
    weights, model = load_pretrained(PREFIX + name.removeprefix(PREFIX), device, cached_attention)
    opened = open_tokenizer(str(weights.folder))
    check_rows(opened, model.config.vocab_size, f"the model in {weights.folder}", "put the model's own there")
    config, generation = weights.architecture().fields, read_generation(weights.folder)
    # the ids at which transformers' generate stops; if the folder names none, those of EOT_NAMES
    ends = end_ids({"config": config, "generation": generation}, None)
    ends = ends or [one for name in EOT_NAMES if (one := opened.token_id(name)) is not None]
    facts = {"weights": str(weights.folder), "commit": weights.commit}
    trained_in = {"dtype": config.get("dtype") or config.get("torch_dtype")}
    return Source(model, opened, weights.folder, set(ends), next(iter(ends), None), facts, trained_in)


def apply_template(folder: Path, prompts: Iterable[str]) -> tuple[list[list[int]], set[int]]:
    """The ids of each prompt in the chat template of the folder's tokenizer, as a user's message up to where
    the answer begins, and the id that ends an answer, if the tokenizer names one. A special token that a
    prompt spells is text. Raises UserError."""
    try:
        template = ChatTemplate(folder)
        ids = [template.prompt(prompt) for prompt in prompts]
    except (UserError, BadRecord) as error:
        told = f"--chat: transformers cannot use a chat template of {folder}: {error}"
        raise UserError(f"{told}; or leave out --chat") from None
    end = template.tokenizer.eos_token_id
    return ids, set() if end is None else {int(end)}


def compute_in(model: Transformer, dtype: str) -> None:
    for name, parameter in model.named_parameters():
        if is_stored_in_compute_dtype(model, name):
            parameter.data = parameter.data.to(DTYPES[dtype])
    model.compute_dtype = DTYPES[dtype]
    model.eval()
