"""With doc_masking, a document in a window is computed as if alone, and what that saves is counted."""

import json

import numpy as np
import pytest
import torch
from support.helpers import TINY, last_run, make_dataset, run_in_one_launch, run_train, write_config

from model import Block, manual_attention, rotary_angles
from model_builder import build_model, count_flops
from model_config import model_config
from ops.documents import Documents, dense_mask, document_starts, positions
from training.batches.windows import epoch_offset
from training.hardware.attention_kernels import choose_attention
from training.records.utilization import document_flops

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EOT, T = 3, 48
PRESETS = ("gpt2", "llama", "llama3", "qwen3")


def small(preset: str, **overrides):
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "d_ff": 96, "vocab_size": 64, "block_size": T}
    return model_config(preset, **{**sizes, "n_kv_head": None if preset == "gpt2" else 2, **overrides})


def documents_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Ids of documents; each ends with EOT and has no other."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.cat([torch.randint(4, 64, (n - 1,), generator=generator), torch.tensor([EOT])]) for n in lengths
    ]


def masked_model(config, asked: str = "sdpa", device=CPU, dtype=torch.float32):
    choice = choose_attention(asked, config, dtype, device, manual_attention, documents=True)
    model = build_model(config, choice.attend, dtype).init_weights(device, seed=1)
    model.documents = Documents(EOT, choice.mask)
    return model


# --- the numbers ---


def test_an_end_of_text_belongs_to_the_document_that_it_ends():
    ids = torch.tensor([[5, EOT, 6, 7, EOT, EOT, 8], [EOT, 5, 5, 5, 5, 5, EOT]])
    starts = document_starts(ids, EOT)
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
    logits = model(torch.stack([torch.cat(first), torch.cat(second)]))
    for row, parts in zip(logits, (first, second), strict=True):
        for ids, part in zip(parts, row.split([len(p) for p in parts]), strict=True):
            assert torch.allclose(part, alone(ids[None])[0], atol=1e-4)


def test_gradients_of_a_packed_window_are_the_sum_of_those_of_each_document():
    config, parts = small("qwen3"), documents_of(20, 28)
    packed, alone = masked_model(config), build_model(config).init_weights("cpu", seed=1)
    ids = torch.cat(parts)[None]
    packed(ids, ids.roll(-1)).backward()
    for part, targets in zip(parts, ids.roll(-1)[0].split([20, 28]), strict=True):
        (alone(part[None], targets[None]) * len(part) / T).backward()
    for mine, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)


def test_without_doc_masking_documents_do_see_each_other():
    config, parts = small("llama"), documents_of(20, 28)
    model = build_model(config).init_weights("cpu", seed=1)
    assert not torch.allclose(model(torch.cat(parts)[None])[0, 20:], model(parts[1][None])[0], atol=1e-2)


# --- the kernel ---


def test_flash_attention_falls_back_and_says_why():
    choice = choose_attention(
        "flash_attn_3", small("qwen3"), torch.float32, CPU, manual_attention, documents=True
    )
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


def test_a_kernel_without_a_mask_cannot_be_given_one():
    config = small("qwen3")
    plain = choose_attention("sdpa", config, torch.float32, CPU, manual_attention)
    model = build_model(config, plain.attend).init_weights("cpu", seed=1)
    model.documents = Documents(EOT, dense_mask)
    with pytest.raises(TypeError):
        model(torch.cat(documents_of(20, 28))[None])


# --- what is counted ---


def test_flops_count_the_squares_of_document_lengths():
    flops, full = count_flops(small("qwen3"), T), small("qwen3")
    assert document_flops(flops, T, T) == flops["flops_per_token_causal"]  # one document: the causal half
    lengths = (20, 28)
    attended = sum(n * n for n in lengths) / T
    scores = 3 * full.n_layer * sum(2 * 2 * n * n * full.n_embd // 2 for n in lengths) / T
    without = flops["flops_per_token"] - 3 * full.n_layer * 4 * T * full.n_embd
    assert document_flops(flops, attended, T) == pytest.approx(without + scores)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset whose documents are 1 to 40 tokens long, and a run over windows of 32 of them."""
    folder = tmp_path_factory.mktemp("documents")
    data = make_dataset(folder / "data")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        path = data / f"{split}.bin"
        ids = np.fromfile(path, "<u2")
        ids[ids == 0] = 1
        ids[np.cumsum(rng.integers(1, 40, len(ids) // 40))] = 0
        ids.tofile(path)
    meta = {"dtype": "uint16", "vocab_size": 64, "eot_id": 0, "tokenizer": {"name": "synthetic"}}
    (data / "meta.json").write_text(json.dumps(meta))
    write_config(folder / "run.py", **{**TINY, "dataset": data, "peak_tflops": 1.0, "max_iters": 8})
    return folder


def train(folder, out: str, *flags: str, processes: int = 1) -> dict:
    done = run_train(folder / "run.py", f"--out_dir={folder / out}", *flags, processes=processes)
    assert done.returncode == 0, done.stderr
    return last_run(folder / out)


def lengths_seen(windows: np.ndarray) -> float:
    """sum(L^2) / sum(L) of the documents in windows (N, T), counted one by one."""
    squares = 0
    for window in windows:
        cuts = [0, *(np.flatnonzero(window[:-1] == 0) + 1), len(window)]
        squares += sum(int(n) ** 2 for n in np.diff(cuts))
    return squares / windows.size


def test_the_record_counts_the_documents_that_were_trained_on(folder):
    """All 624 windows of an epoch in one iteration, so that order does not matter."""
    flags = ["--batch_size=52", "--doc_masking=True", "--gradient_accumulation_steps=12", "--max_iters=7"]
    rows = train(folder, "counted", *flags)["training_iterations"]
    ids = np.fromfile(folder / "data" / "train.bin", "<u2")
    windows = np.roll(ids, -epoch_offset(1, 32))[: 624 * 32].reshape(624, 32)
    mfu = rows[1]["mfu"]  # of the second epoch; the first iteration has none
    flops = count_flops(model_config("qwen3", **shape_of_tiny()), 32)
    assert mfu["document_length_per_token"] == pytest.approx(lengths_seen(windows))
    assert mfu["flops_per_token_causal"] == pytest.approx(
        document_flops(flops, mfu["document_length_per_token"], 32)
    )
    assert mfu["flops_per_token"] == flops["flops_per_token"]
    assert mfu["mfu_causal_percent"] < mfu["mfu_percent"]


def shape_of_tiny() -> dict:
    names = ("n_layer", "n_head", "n_embd", "d_ff", "vocab_size", "block_size")
    return {**{name: TINY[name] for name in names}, "n_kv_head": TINY["num_key_value_heads"]}


def test_two_processes_train_as_one(folder):
    flags = ["--doc_masking=True", "--eval_interval=4", "--eval_at_start=True"]
    one = train(folder, "one", *flags, "--gradient_accumulation_steps=2")
    strategies = {"ddp": [], "fsdp": ["--use_fsdp=True"]}
    commands = [
        [folder / "run.py", f"--out_dir={folder / name}", *flags, *f] for name, f in strategies.items()
    ]
    run_in_one_launch(folder, commands, processes=2)
    for two in (last_run(folder / name) for name in strategies):
        for mine, theirs in zip(one["training_iterations"], two["training_iterations"], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            if mine["mfu"]:
                lengths = [row["mfu"]["document_length_per_token"] for row in (mine, theirs)]
                assert lengths[0] == pytest.approx(lengths[1], rel=1e-5)
        assert one["eval_steps"][-1]["val_loss"] == pytest.approx(two["eval_steps"][-1]["val_loss"], rel=1e-5)


def test_compiled_blocks_give_the_same_losses(folder):
    flags = [folder / "run.py", "--doc_masking=True", "--max_iters=3"]
    outs = [f"--out_dir={folder / name}" for name in ("plain", "compiled")]
    run_in_one_launch(folder, [[*flags, outs[0]], [*flags, outs[1], "--compile=True"]])
    plain, compiled = (last_run(folder / name) for name in ("plain", "compiled"))
    for mine, theirs in zip(plain["training_iterations"], compiled["training_iterations"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.parametrize("flag", ["--doc_masking=True", "--packing=truncate"])
def test_a_dataset_without_end_of_text_is_refused(folder, tmp_path, flag):
    data = make_dataset(tmp_path / "data")
    done = run_train(folder / "run.py", f"--out_dir={tmp_path / 'out'}", f"--dataset={data}", flag)
    assert done.returncode == 2
    assert "names no eot_id" in done.stderr


# --- on a GPU ---


def gpu_inputs(B=2, T=512, H=4, K=2, D=64, dtype=torch.bfloat16):
    q, k, v = (
        torch.randn(B, T, heads, D, dtype=dtype, device=GPU, requires_grad=True) for heads in (H, K, K)
    )
    starts = torch.zeros(B, T, dtype=torch.int32, device=GPU)
    starts[0, [100, 101, 300]] = 1
    return (q, k, v), starts.cumsum(-1, dtype=torch.int32)


@pytest.mark.gpu
def test_flex_attention_is_chosen_and_agrees_with_manual_attention():
    config = small("qwen3", n_embd=256, block_size=512)
    choice = choose_attention("sdpa", config, torch.bfloat16, GPU, manual_attention, documents=True)
    assert choice.kernel == "flex attention", choice.reason
    qkv, numbers = gpu_inputs()
    above = torch.randn_like(qkv[0])
    ours = choice.attend(*qkv, 0.0, choice.mask(numbers))
    gradients = torch.autograd.grad(ours, qkv, above)
    wide = [t.detach().float().requires_grad_() for t in qkv]
    theirs = manual_attention(*wide, 0.0, dense_mask(numbers))
    expected = torch.autograd.grad(theirs, wide, above.float())
    assert torch.allclose(ours.float(), theirs, atol=2e-2)
    for mine, other in zip(gradients, expected, strict=True):
        assert torch.allclose(mine.float(), other, atol=5e-2)


@pytest.mark.gpu
def test_a_compiled_block_takes_new_documents_without_compiling_again():
    config = small("qwen3", n_embd=256, block_size=512)
    choice = choose_attention("sdpa", config, torch.bfloat16, GPU, manual_attention, documents=True)
    block = Block(config, choice.attend).to(GPU)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    rotary = rotary_angles(512, 64, 1e4, GPU)
    x = torch.randn(2, 512, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.utils.counters.clear()
    for seed in range(4):
        numbers = (torch.rand(2, 512, device=GPU) < 0.01 * seed).cumsum(-1, dtype=torch.int32)
        y, delta = compiled(x, torch.zeros_like(x), rotary, choice.mask(numbers))
        expected, wanted = block(x, torch.zeros_like(x), rotary, choice.mask(numbers))
        (y + delta).sum().backward()
        assert torch.allclose((y + delta).float(), (expected + wanted).float(), atol=5e-2)
        if seed == 0:
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


GPU_RUN = [
    "--device=cuda",
    "--dtype=bfloat16",
    "--compile=True",
    "--block_size=256",
    "--n_embd=256",
    "--max_iters=14",
]


@pytest.mark.gpu
@pytest.mark.parametrize("more", [["--use_cuda_graphs=True"], ["--compile_scope=whole"], ["--compile=False"]])
def test_every_way_to_run_the_step_gives_the_losses_of_the_usual_one(folder, more):
    usual = train(folder, "gpu-usual", "--doc_masking=True", *GPU_RUN)
    other = train(folder, f"gpu{more[0]}", "--doc_masking=True", *GPU_RUN, *more)
    assert "flex attention" in usual["startup_info"]["attention"]["line"]
    for mine, theirs in zip(usual["training_iterations"], other["training_iterations"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
    if "cuda_graphs" in more[0]:
        assert other["startup_info"]["cuda_graphs"]["used"] == "CUDA Graph"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("more", [[], ["--use_fsdp=True"], ["--use_zero1=True"]])
def test_two_gpus_mask_documents_as_one_does(folder, more):
    one = train(folder, "gpu-one", "--doc_masking=True", *GPU_RUN, "--gradient_accumulation_steps=2")
    two = train(folder, f"gpu-two{len(more and more[0])}", "--doc_masking=True", *GPU_RUN, *more, processes=2)
    for mine, theirs in zip(one["training_iterations"], two["training_iterations"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
