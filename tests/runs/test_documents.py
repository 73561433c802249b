"""With doc_masking, a document in a window is computed as if alone, and what that saves is counted."""

import numpy as np
import pytest
import torch
from support.helpers import STRATEGIES, TINY, last_run, losses, make_dataset, run_in_one_launch
from support.masked_documents import CPU, EOT, T, small, train

from model import manual_attention
from model_builder import build_model, count_flops
from ops.documents import Documents, dense_mask, document_starts, positions
from training.batches.document_starts import EndOfText
from training.batches.windows import epoch_offset
from training.configuration.keys import TrainConfig
from training.hardware.attention_kernels import choose_attention
from training.records.utilization import document_flops

PRESETS = ("gpt2", "llama", "llama3", "qwen2", "qwen3")


def documents_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Ids of documents; each ends with EOT and has no other."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.cat([torch.randint(4, 64, (n - 1,), generator=generator), torch.tensor([EOT])]) for n in lengths
    ]


def marked(ids: torch.Tensor) -> torch.Tensor:
    """Rows of ids as the loader marks them."""
    rows = ids.numpy().copy()
    for row in rows:
        EndOfText(None, EOT).mark(row, 0)
    return torch.from_numpy(rows)


def masked_model(config, asked: str = "sdpa", device=CPU, dtype=torch.float32):
    choice = choose_attention(asked, config, dtype, device, manual_attention, documents=True)
    model = build_model(config, choice.attend, dtype).init_weights(device, seed=1)
    model.documents = Documents(choice.mask)
    return model


# --- the numbers ---


def test_an_end_of_text_belongs_to_the_document_that_it_ends():
    ids = torch.tensor([[5, EOT, 6, 7, EOT, EOT, 8], [EOT, 5, 5, 5, 5, 5, EOT]])
    starts = document_starts(marked(ids))
    assert starts.int().tolist() == [[1, 0, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert positions(starts).tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("asked", ["sdpa", "manual"])
@pytest.mark.parametrize("preset", PRESETS)
def test_logits_of_a_packed_window_equal_those_of_each_document_alone(preset, asked):
    config = small(preset)
    model = masked_model(config, asked)
    alone = build_model(config).init_weights("cpu", seed=1)
    first = documents_of(20, 1, 7, 20)
    second = documents_of(48, seed=1)
    logits = model(marked(torch.stack([torch.cat(first), torch.cat(second)])))
    for row, parts in zip(logits, (first, second), strict=True):
        for ids, part in zip(parts, row.split([len(p) for p in parts]), strict=True):
            assert torch.allclose(part, alone(ids[None])[0], atol=1e-4)


def test_gradients_of_a_packed_window_are_the_sum_of_those_of_each_document():
    config, parts = small("qwen3"), documents_of(20, 28)
    packed, alone = masked_model(config), build_model(config).init_weights("cpu", seed=1)
    ids = torch.cat(parts)[None]
    packed(marked(ids), ids.roll(-1)).backward()
    for part, targets in zip(parts, ids.roll(-1)[0].split([20, 28]), strict=True):
        (alone(part[None], targets[None]) * len(part) / T).backward()
    for mine, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)


# --- the kernel ---


def test_flash_attention_falls_back_and_says_why():
    asked = ("flash_attn_3", small("qwen3"), torch.float32, CPU, manual_attention)
    choice = choose_attention(*asked, documents=True)
    assert (choice.used, choice.kernel) == ("sdpa", "dense mask")
    assert "flash_attn_3: doc_masking" in choice.to_dict()["line"]


def test_a_kernel_that_lets_documents_see_each_other_is_not_chosen(monkeypatch):
    def ignores_documents(q, k, v, dropout_p, mask):
        return manual_attention(q, k, v)

    found = [("careless", ignores_documents, dense_mask)]
    monkeypatch.setitem(choose_attention.__globals__["DOCUMENT_BACKENDS"], "sdpa", lambda *_: found)
    choice = choose_attention("sdpa", small("qwen3"), torch.float32, CPU, manual_attention, documents=True)
    assert choice.used == "manual"
    assert "documents see each other" in choice.reason


# --- what is counted ---


def test_flops_count_the_squares_of_document_lengths():
    flops, full = count_flops(small("qwen3"), T), small("qwen3")
    assert document_flops(flops, T, T) == flops["flops_per_token_causal"]  # one document: the causal half
    lengths = (20, 28)
    attended = sum(n * n for n in lengths) / T
    scores = 3 * full.n_layer * sum(2 * 2 * n * n * full.n_embd // 2 for n in lengths) / T
    without = flops["flops_per_token"] - 3 * full.n_layer * 4 * T * full.n_embd
    assert document_flops(flops, attended, T) == pytest.approx(without + scores)


def lengths_seen(windows: np.ndarray) -> float:
    """sum(L^2) / sum(L) of the documents in windows (N, T), counted one by one."""
    squares = 0
    for window in windows:
        cuts = [0, *(np.flatnonzero(window[:-1] == 0) + 1), len(window)]
        squares += sum(int(n) ** 2 for n in np.diff(cuts))
    return squares / windows.size


def test_the_record_counts_the_documents_that_were_trained_on(documents_run):
    """All 624 windows of an epoch in one iteration, so that order does not matter."""
    flags = ["--batch_size=52", "--doc_masking=True", "--gradient_accumulation_steps=12", "--max_iters=7"]
    rows = train(documents_run, "counted", *flags)["training_iterations"]
    ids = np.fromfile(documents_run / "data" / "train.bin", "<u2")
    windows = np.roll(ids, -epoch_offset(1, 32))[: 624 * 32].reshape(624, 32)
    mfu = rows[1]["mfu"]  # of the second epoch; the first iteration has none
    flops = count_flops(TrainConfig(**TINY).model_config(), 32)
    assert mfu["document_length_per_token"] == pytest.approx(lengths_seen(windows))
    causal = document_flops(flops, mfu["document_length_per_token"], 32)
    assert mfu["flops_per_token_causal"] == pytest.approx(causal)
    assert mfu["flops_per_token"] == flops["flops_per_token"]
    assert mfu["mfu_causal_percent"] < mfu["mfu_percent"]


def test_two_processes_train_as_one(documents_run):
    flags = ["--doc_masking=True", "--eval_interval=4", "--eval_at_start=True"]
    one = train(documents_run, "one", *flags, "--gradient_accumulation_steps=2")
    strategies = {name: flags for name, flags in STRATEGIES.items() if name != "zero1"}
    start = [documents_run / "run.py", *flags]
    commands = [[*start, f"--out_dir={documents_run / name}", *more] for name, more in strategies.items()]
    run_in_one_launch(documents_run, commands, processes=2)
    for two in (last_run(documents_run / name) for name in strategies):
        assert losses(two) == pytest.approx(losses(one), rel=1e-5)
        mine, theirs = ([row["mfu"] for row in record["training_iterations"][1:]] for record in (one, two))
        for ours, of_two in zip(mine, theirs, strict=True):
            lengths = ours["document_length_per_token"], of_two["document_length_per_token"]
            assert lengths[0] == pytest.approx(lengths[1], rel=1e-5)
        assert one["eval_steps"][-1]["val_loss"] == pytest.approx(two["eval_steps"][-1]["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_losses(documents_run):
    flags = [documents_run / "run.py", "--doc_masking=True", "--max_iters=3"]
    outs = [f"--out_dir={documents_run / name}" for name in ("plain", "compiled")]
    run_in_one_launch(documents_run, [[*flags, outs[0]], [*flags, outs[1], "--compile=True"]])
    plain, compiled = (losses(last_run(documents_run / name)) for name in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("flag", ["--doc_masking=True", "--packing=truncate"])
def test_a_dataset_without_end_of_text_is_refused(documents_run, tmp_path, flag, run, capsys):
    data = make_dataset(tmp_path / "data")
    assert run(documents_run / "run.py", f"--out_dir={tmp_path / 'out'}", f"--dataset={data}", flag) == 2
    assert "names no eot_id" in capsys.readouterr().err
