"""The files of a checkpoint: damage is found, nothing in them is executed, older files are read."""

import hashlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.all_recipes import recipe_of
from support.checkpoint_parts import (
    as_format_2,
    copies,
    copy_checkpoint,
    halves,
    make_config,
    make_saver,
    make_state,
    save,
    sign,
)
from support.helpers import ROOT, checkpoint_tensors, edit_json

from common.errors import UserError
from ops.linear import Linear
from training.checkpoints.loading import load_checkpoint, load_weights
from training.checkpoints.saved_state import read_state
from training.checkpoints.tensor_files import Part, read_header, write_parts
from training.checkpoints.tensor_reader import TensorFiles
from training.checkpoints.verification import damage, digest, open_tensors, recorded_files
from training.pretrained.writing import write_model

pytestmark = pytest.mark.damage

# by format: sha256 over the names and bytes of all tensors, taken when it was saved and not by our code: by
# ZeRO-1 on two ranks, after 3 iterations of a gated model of this shape
GOLDEN = {
    2: "89e937184f3cc8b80baf7ba494f032e0e85d616630504f246b23e5088316c490",
    3: "3db99bb282ce5dcab05129a013aeb005d41477a844e27d604d74a537e4c42eba",
}
GOLDEN_SHAPE = {"vocab_size": 16, "block_size": 8, "dropout": 0.1}
# of model.safetensors, as the version that saved format 2 exported that checkpoint
GOLDEN_EXPORT = "c4ba5fde9de7b6ef5b0df29a36ee8c387445551f460421622bbcfa053adb9d43"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("saved") / "out")
    state = make_state(config)
    return save(make_saver(config, state), 3, val_loss=1.0), copies(state)


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a checkpoint that a test may damage."""
    return shutil.copytree(saved[0], tmp_path / "step-00000003")


# --- damage ---

FILES = ("tensors-00000-0.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_found_and_its_file_named(folder, name):
    """100 random places of each kind of file. A bit of white space in the manifest, which is not hashed, may
    change; then it still says the same."""
    content, expected = (folder / name).read_bytes(), recorded_files(folder)
    generator = random.Random(name)
    for _ in range(100):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        (folder / name).write_bytes(flipped)
        problems = damage(folder)
        if name != "manifest.json":
            assert len(problems) == 1 and problems[0] == f"{name} does not match its sha256"
        elif not problems:
            assert recorded_files(folder) == expected
    (folder / name).write_bytes(content)
    assert damage(folder) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0, 0.5, 0.99, None])
def test_a_truncated_or_missing_file_is_found_and_named(folder, name, share):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int((share or 0) * len(content))])
    if share is None:
        (folder / name).unlink()
    assert name in damage(folder)[0]


# --- the format ---


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_s_own_reader_reads_the_files(saved):
    folder, expected = saved
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_a_part_keeps_its_bits_and_its_place(tmp_path, dtype):
    tensor = torch.arange(15).view(3, 5).to(dtype).t()  # not contiguous
    parts = [
        (Part("scalar", (), (), torch.float32), torch.tensor(2.5)),
        (Part("t", (4, 0), (5, 3), dtype), tensor),
    ]
    written = write_parts(tmp_path / "a.safetensors", parts)
    assert written == digest(tmp_path / "a.safetensors")
    read = sorted(read_header(tmp_path / "a.safetensors"), key=lambda part: part.name)
    assert read == [part for part, _ in parts]
    with pytest.raises(FileExistsError):
        write_parts(tmp_path / "a.safetensors", parts)


def test_a_tensor_whose_part_is_missing_is_refused(tmp_path):
    for start in (0, 2):
        part = Part("t", (start,), (2,), torch.float32)
        write_parts(tmp_path / f"{start}.safetensors", [(part, torch.ones(2))])
    paths = sorted(tmp_path.iterdir())
    read = [[*read_header(path).items()] for path in paths]
    assert TensorFiles(read[0] + read[1]).wholes["t"].shape == (4,)
    with pytest.raises(ValueError, match="the parts of t do not make"):
        TensorFiles(read[1])


def test_an_optional_tensor_of_another_shape_begins_anew_and_the_others_are_read(tmp_path):
    """What fp8_delayed keeps, after allow_changes=amax_history."""
    config = make_config(tmp_path / "out")
    before, now = make_state(config, 1), make_state(config, 2)
    for state, length in ((before, 4), (now, 2)):
        state.recipe = recipe_of("fp8_delayed", Linear(16, 16), amax_history=length)
    for tensor in before.recipe.state().values():
        tensor.fill_(3.0)
    load_checkpoint(save(make_saver(config, before), 3), now)
    kept = now.recipe.state()
    assert kept["scale"].tolist() == [3, 3, 3] and not kept["history"].any()
    assert all(torch.equal(tensor, copies(now)[name]) for name, tensor in copies(before).items())


# --- nothing in a checkpoint is executed ---


class Malice:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def refused(folder: Path) -> str:
    """The manifest matches, so it protects from nothing here: what is in the files is refused."""
    sign(folder)
    problems = "; ".join(damage(folder))
    if not problems:
        with pytest.raises(UserError) as error:
            load_weights(folder, torch.device("cpu"))
        return str(error.value)
    assert "does not match its sha256" not in problems
    return problems


@pytest.mark.parametrize("name", ["tensors-00000-0.safetensors", "state.json", "manifest.json", ".metadata"])
@pytest.mark.security
def test_a_pickle_in_the_place_of_any_file_is_not_read(folder, tmp_path, name):
    canary = tmp_path / "canary"
    (folder / name).write_bytes(pickle.dumps(Malice(canary)))
    if name == ".metadata":  # what torch.distributed.checkpoint would read
        sign(folder)
        load_weights(folder, torch.device("cpu"))
    elif name == "manifest.json":
        assert damage(folder)
    else:
        refused(folder)
    assert not canary.exists()
    pickle.loads((folder / name).read_bytes())
    assert canary.exists(), "the attack would have worked"


@pytest.mark.security
def test_files_that_the_manifest_does_not_list_are_not_read(folder):
    expected = checkpoint_tensors(folder)
    shutil.copy(folder / "tensors-00000-0.safetensors", folder / "tensors-00009-0.safetensors")
    state = make_state(make_config(folder.parent / "out"), seed=9)
    load_checkpoint(folder, state)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.tensors().items())


# --- earlier versions ---


def golden(version: int) -> Path:
    return ROOT / f"tests/support/golden/format-{version}/step-00000003"


@pytest.mark.parametrize("version", GOLDEN)
def test_a_checkpoint_that_an_earlier_version_saved_loads_bit_for_bit(version):
    assert damage(golden(version)) == []
    state = make_state(make_config("unused", **GOLDEN_SHAPE))
    progress = load_checkpoint(golden(version), state)
    assert (progress.iteration, progress.samples_seen) == (3, 6)
    loaded = state.tensors() | {"rng.0.cpu": torch.get_rng_state()}
    sha256 = hashlib.sha256()
    for name in sorted(loaded):
        tensor = (halves(name, loaded[name]) if version == 2 else loaded[name]).contiguous()
        sha256.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert sha256.hexdigest() == GOLDEN[version]


def test_its_export_is_the_bytes_that_the_earlier_version_wrote(tmp_path):
    saved = read_state(golden(2))
    write_model(tmp_path, open_tensors(golden(2), saved), saved.model_config, torch.float32, {})
    assert digest(tmp_path / "model.safetensors")["sha256"] == GOLDEN_EXPORT


@pytest.mark.parametrize("preset", ["qwen3", "gpt2"])
def test_only_ffn_up_of_a_gated_model_has_other_rows_in_format_2(tmp_path, preset):
    """Also with biases, which qwen3 has not."""
    config = make_config(tmp_path / "out", bias=True, arch_preset=preset, num_key_value_heads=2)
    state = make_state(config)
    folder, expected = save(make_saver(config, state), 3), copies(state)
    if preset == "qwen3":
        folder, up = as_format_2(folder, tmp_path / "older" / folder.name), "model.blocks.0.ffn.up.bias"
        assert not torch.equal(checkpoint_tensors(folder)[up], expected[up])
    else:
        folder = copy_checkpoint(folder, tmp_path, 3, format=2)
    found = make_state(config, seed=9)
    assert damage(folder) == []
    load_checkpoint(folder, found)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.tensors().items())
    _, model = load_weights(folder, torch.device("cpu"))
    assert all(torch.equal(p.detach(), expected[f"model.{name}"]) for name, p in model.named_parameters())


@pytest.mark.parametrize("in_halves", [True, False])
def test_any_rows_in_any_parts_are_read_in_order_also_from_halves(tmp_path, in_halves):
    whole = torch.arange(30.0).view(10, 3)
    stored = halves("a.ffn.up.weight", whole) if in_halves else whole
    places, start = [], 0
    for count in (3, 4, 3):  # both halves are in two parts
        path = tmp_path / f"{start}.safetensors"
        part = Part("t", (start, 0), (count, 3), torch.float32)
        write_parts(path, [(part, stored[start : start + count])])
        places += read_header(path).items()
        start += count
    reader = TensorFiles(places, {"t"} if in_halves else ())
    for rows in (range(10)[a:b:step] for a in range(10) for b in range(a + 1, 11) for step in (1, 2)):
        assert torch.equal(reader.read_rows("t", rows), whole[rows.start : rows.stop : rows.step]), rows
    with pytest.raises(ValueError, match="t has 10 rows, and 11 were asked for"):
        reader.load(Part("t", (8, 0), (3, 3), torch.float32), torch.empty(3, 3))


@pytest.mark.parametrize("shape", [(), (3,), (5, 2)], ids=str)
@pytest.mark.security
def test_halves_that_are_no_pairs_are_damage(tmp_path, shape):
    config = make_config(tmp_path / "out")
    folder = as_format_2(save(make_saver(config, make_state(config)), 3), tmp_path / "step-00000003")
    part = Part("model.blocks.0.ffn.up.other", (0,) * len(shape), shape, torch.float32)
    write_parts(folder / "tensors-00009-0.safetensors", [(part, torch.ones(shape))])
    assert "the rows of model.blocks.0.ffn.up.other are not pairs" in refused(folder)


@pytest.mark.parametrize(
    "keys", [{}, {"optimizer": "muon"}, {"adam_dtype": "bfloat16"}, {"adam_dtype": "8bit"}]
)
def test_formats_that_list_no_tensors_must_have_what_their_optimizer_keeps(tmp_path, keys):
    """Format 4 was that of Muon."""
    config = make_config(tmp_path / "out", n_embd=64, d_ff=64, n_head=4, **keys)
    state = make_state(config)
    folder, version = save(make_saver(config, state), 3), 4 if keys.get("optimizer") else 3
    older = copy_checkpoint(folder, tmp_path, 3, format=version, tensors={})
    assert damage(older) == []
    found = make_state(config, seed=9)
    load_checkpoint(older, found)
    assert all(torch.equal(tensor, copies(state)[name]) for name, tensor in found.tensors().items())
    of_another = {"optimizer": "adamw", "adam_dtype": "float32"} if keys else {"adam_dtype": "bfloat16"}
    content = json.loads((older / "state.json").read_text())["config"]
    for wrong in (of_another, {"optimizer": "support.lion"}, {"adam_dtype": 4}):
        edit_json(older / "state.json", config=content | wrong)
        sign(older)
        (problem,) = damage(older)
        assert "optimizer" in problem


@pytest.mark.parametrize("version", [1, 6])
def test_another_format_is_named_and_not_set_aside(folder, version):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": version}))
    assert f"has checkpoint format {version}; this version of nanoMFU reads 2, 3, 4, 5" in refused(folder)
    assert damage(folder) == []
