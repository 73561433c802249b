"""What holds for the first chunk, group, source or GPU holds for the second. Chunks are made small here, so
that data of a few kilobytes has several."""

import hashlib
import json
import threading

import numpy as np
import pytest
import torch
from support.helpers import TINY, edit_json, make_dataset
from test_mixture import config, mixed

from common.errors import UserError
from data.pipeline import verified
from training.batches import document_starts, fingerprint, packing
from training.batches.sources import RunData, describe_data, make_windows, open_sources
from training.batches.token_files import TokenFiles
from training.checkpoints import tensor_files, verification
from training.checkpoints.tensor_files import Part, write_parts
from training.configuration.keys import TrainConfig
from training.hardware.peaks import Peak
from training.records.startup_info import accumulation_steps
from training.records.utilization import utilization

# --- one GPU and eight ---

FLOPS = {
    "flops_per_token": 1000,
    "flops_per_token_causal": 800,
    "attention_flops_per_layer": 64_000,
    "ffn_flops_per_layer": 32_000,
    "logit_flops": 1,
    "attention_to_ffn_ratio": 2.0,
    "calculation_method": "test",
}
PEAK = Peak(1e-4, "a test", of_formats={"fp8": Peak(2e-4, "a test")})  # 1e8 FLOP/s for each GPU
# 20,000 tokens/s of each GPU: 2e7 of 1e8 FLOP/s; causal 1.6e7; with 250 FLOPs recomputed for a token, 2.5e7
PER_GPU = {
    "mfu": 0.2,
    "mfu_percent": 20,
    "hfu_percent": 25,
    "mfu_causal_percent": 16,
    "mfu_bf16_percent": 20,
    "mfu_fp8_percent": 10,
    "tokens_per_sec_per_gpu": 20_000,
    "achieved_tflops_per_gpu": 2e-5,
    "flops_per_token": 1000,
    "flops_per_token_causal": 800,
}
OF_ALL_GPUS = {
    "tokens_per_sec": 20_000,
    "achieved_tflops": 2e-5,
    "flops_achieved": 2e7,
    "hardware_peak_flops": 1e8,
    "hardware_peak_tflops": 1e-4,
    "hardware_peak_fp8_tflops": 2e-4,
    "num_gpus": 1,
}


@pytest.mark.parametrize("gpus", [1, 8])
def test_every_figure_of_utilization_is_of_one_gpu_or_of_all_and_so_is_its_limit(gpus):
    found = utilization(20_000 * gpus, gpus, FLOPS, PEAK, {}, recomputed=250)
    for name, value in PER_GPU.items():
        assert found[name] == pytest.approx(value), name
    for name, value in OF_ALL_GPUS.items():
        assert found[name] == pytest.approx(gpus * value), name
    rest = "sparse_mode attention_flops_per_layer ffn_flops_per_layer logit_flops attention_to_ffn_ratio"
    assert found.keys() == {*PER_GPU, *OF_ALL_GPUS, *rest.split()}, "a new figure needs a line above"
    assert utilization(199_000 * gpus, gpus, FLOPS, PEAK, {})["mfu_fp8_percent"] == pytest.approx(99.5)
    with pytest.raises(ValueError, match="computed 100.5 % of the peak"):
        utilization(201_000 * gpus, gpus, FLOPS, PEAK, {})
    steps = accumulation_steps(TrainConfig(**{**TINY, "gradient_accumulation_steps": 3}), gpus)
    assert list(steps.values()) == [3, 3 * gpus]


# --- the second chunk of a file ---


@pytest.fixture
def ids(tmp_path):
    """(path, 1000 ids of 2 bytes); the largest is in the last chunk."""
    values = np.arange(1, 1001).astype("<u2")
    path = tmp_path / "train.bin"
    values.tofile(path)
    return path, values


def test_hash_and_largest_id_are_of_all_chunks(ids, monkeypatch):
    path, values = ids
    monkeypatch.setattr(verified, "READ_BYTES", 64)
    wanted = hashlib.sha256(values.tobytes()).hexdigest()
    assert verified.scan(path, "uint16", lambda count: None, threading.Event()) == (wanted, 1000)
    values[::-1].tofile(path)
    largest = verified.scan(path, "uint16", lambda count: None, threading.Event())[1]
    assert largest == 1000, "in the first chunk now"
    monkeypatch.setattr(verification, "HASH_CHUNK", 64)
    content = path.read_bytes()
    assert verification.digest(path) == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": 2000}


def test_a_probe_sees_the_whole_file(ids, monkeypatch):
    path, values = ids
    monkeypatch.setattr(fingerprint, "PROBE_BYTES", 64)
    monkeypatch.setattr(fingerprint, "PROBES", 3)
    first = fingerprint._probe(path, 2000)
    for place in (0, 500, 999):  # 192 bytes are read: at the beginning, in the middle and at the end
        changed = values.copy()
        changed[place] = 0
        changed.tofile(path)
        assert fingerprint._probe(path, 2000) != first, place


def test_a_tensor_file_of_many_chunks_is_what_its_digest_says(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "WRITE_CHUNK", 16)
    parts = [(Part(name, (0, 0), (5, 7), torch.float32), torch.randn(5, 7)) for name in "ab"]
    path = tmp_path / "t.safetensors"
    written = write_parts(path, parts)
    content = path.read_bytes()
    assert written == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    places = tensor_files.read_header(path)
    for part, tensor in parts:
        assert torch.equal(tensor_files.mapped(part, places[part]), tensor)


# --- the second group of a packing ---


@pytest.fixture
def documents(tmp_path):
    """(tokens, [ids of each document]): 300 documents, some of them empty, some longer than a window."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 40, 300)
    parts = [np.append(rng.integers(1, 100, length - 1), 0) for length in lengths]
    parts[-1] = np.full(9, 7)  # the last one has no end-of-text
    path = tmp_path / "train.bin"
    np.concatenate(parts).astype("<u2").tofile(path)
    tokens = TokenFiles([path], [path.stat().st_size], np.dtype("<u2"), 100)
    return tokens, [part for part in parts if len(part) > 1]


@pytest.mark.parametrize(("together", "chunk"), [(1 << 16, 1 << 24), (16, 1 << 24), (1 << 16, 50), (16, 50)])
def test_each_document_is_packed_once(tmp_path, documents, monkeypatch, together, chunk):
    """Groups of 16 documents, tokens read 50 at a time: nothing is lost or twice at their borders."""
    monkeypatch.setattr(packing, "PACKED_TOGETHER", together)
    monkeypatch.setattr(document_starts, "CHUNK_TOKENS", chunk)
    tokens, wanted = documents
    starts = document_starts.EndOfText(tokens, 0)
    folder, index = packing.pack_documents(starts, tmp_path, "train", 31)
    windows = packing.PackedWindows(starts, 31, folder, index)
    found = []
    for row in windows.read(np.arange(windows.count)):
        kept = row[row >= 0]
        assert (row[len(kept) :] == ~0).all(), "padding is at the end"
        found += [tuple(piece) for piece in np.split(kept, np.flatnonzero(kept == 0) + 1) if len(piece)]
    cut = [tuple(part[:32]) for part in wanted]
    assert sorted(found) == sorted(cut)
    kept = sum(map(len, cut))
    assert (index["documents"], index["tokens_kept"]) == (len(wanted), kept)
    assert index["tokens_cut_off"] == tokens.total - kept
    assert index["share_padded"] == 1 - kept / (32 * windows.count)


# --- the second source of a mixture ---


@pytest.fixture
def folders(tmp_path):
    return [make_dataset(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]


@pytest.mark.parametrize("val", range(3))
@pytest.mark.parametrize("train", range(3))
def test_no_validation_file_is_a_training_file_of_any_source(folders, train, val):
    of_train, meta = (json.loads((folders[n] / "meta.json").read_text()) for n in (train, val))
    meta["files"]["val.bin"] = of_train["files"]["train.bin"]
    (folders[val] / "meta.json").write_text(json.dumps(meta))
    (folders[val] / "val.bin").write_bytes((folders[train] / "train.bin").read_bytes())
    with pytest.raises(UserError, match="is the same file as") as error:
        open_sources(config(mixed(folders, (1, 1, 1)), eval_interval=1), scan=False)
    assert f"{folders[val]}/val.bin is the same file as {folders[train]}/train.bin" in str(error.value)


@pytest.mark.parametrize("other", [1, 2])
def test_every_source_must_have_the_tokenizer_of_the_first(folders, other):
    edit_json(folders[other] / "meta.json", tokenizer={"name": "another"})
    with pytest.raises(UserError, match=f"'{folders[0]}' and '{folders[other]}' cannot be mixed"):
        open_sources(config(mixed(folders, (1, 1, 1))), scan=False)


def test_what_is_said_of_a_mixture_is_said_of_each_source(tmp_path):
    second = make_dataset(tmp_path / "b", train_tokens=10_000, val_tokens=5_000, seed=1)
    folders = [make_dataset(tmp_path / "a", train_tokens=20_000), second]
    settings = config(mixed(folders, (1, 3)), eval_interval=1)
    sources = open_sources(settings, scan=False)
    described = describe_data(RunData(sources, {"sha256": "f"}, make_windows(sources, settings)), samples=624)
    assert described["tokens"] == {"train": 30_000, "val": 9_000}
    first, second = described["sources"]
    assert (first["weight"], second["weight"]) == (0.25, 0.75)
    assert (first["tokens"]["train"], second["tokens"]["train"]) == (20_000, 10_000)
    # a quarter of 624 samples over 624 windows; three quarters over 312
    assert (first["epochs"], second["epochs"]) == pytest.approx((0.25, 1.5), rel=0.01)
