"""The files of a checkpoint: damage is found [8], nothing in them is executed [24], older formats are read
[28]. Numbers in brackets are those of the table of faults in SYSTEM_OVERVIEW.md."""

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
from checkpoint_parts import ALONE, copies, make_config, make_saver, make_state, save, sign
from helpers import ROOT, checkpoint_tensors
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from common.errors import UserError
from training.checkpoints import format_1
from training.checkpoints.loading import load_checkpoint, load_weights
from training.checkpoints.saved_state import read_state
from training.checkpoints.tensor_files import Part, TensorFiles, read_header, write_parts
from training.checkpoints.verification import damage_here, digest, recorded_files, verify_checkpoint

# format -> sha256 over the names and bytes of all tensors, taken when it was saved and not by our code: by
# ZeRO-1 on two ranks, after 3 iterations of a model of this shape
GOLDEN = {
    1: "89e937184f3cc8b80baf7ba494f032e0e85d616630504f246b23e5088316c490",
    2: "89e937184f3cc8b80baf7ba494f032e0e85d616630504f246b23e5088316c490",
}
GOLDEN_SHAPE = {"vocab_size": 16, "block_size": 8, "dropout": 0.1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("saved") / "out")
    state = make_state(config)
    return save(make_saver(config, state), 3, val_loss=1.0), copies(state)


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a checkpoint that a test may damage."""
    return shutil.copytree(saved[0], tmp_path / "step-00000003")


# --- damage [8] ---

FILES = ("tensors-00000-0.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
def test_item_8_any_flipped_bit_is_found_and_its_file_named(folder, name):
    """100 random places of each kind of file. A bit of white space in the manifest, which is not hashed, may
    change; then it still says the same."""
    content, expected = (folder / name).read_bytes(), recorded_files(folder)
    generator = random.Random(name)
    for _ in range(100):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        (folder / name).write_bytes(flipped)
        problems = damage_here(folder)
        if name != "manifest.json":
            assert len(problems) == 1 and problems[0] == f"{name} does not match its sha256"
        elif not problems:
            assert recorded_files(folder) == expected
    (folder / name).write_bytes(content)
    assert damage_here(folder) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0, 0.5, 0.99, None])
def test_item_8_a_truncated_or_missing_file_is_found_and_named(folder, name, share):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int((share or 0) * len(content))])
    if share is None:
        (folder / name).unlink()
    assert name in damage_here(folder)[0]


@pytest.mark.parametrize(
    "manifest",
    [
        "[]",
        "{}",
        '{"files": {}}',
        '{"files": {"../x": {"sha256": "", "bytes": 0}, "state.json": {"sha256": "", "bytes": 0}}}',
        '{"files": {"state.json": 7}}',
    ],
)
def test_item_8_a_manifest_that_is_none_is_named(folder, manifest):
    (folder / "manifest.json").write_text(manifest)
    assert "manifest.json" in damage_here(folder)[0]


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
    assert {part.name: part for part in read_header(tmp_path / "a.safetensors")} == {
        part.name: part for part, _ in parts
    }
    with pytest.raises(FileExistsError):
        write_parts(tmp_path / "a.safetensors", parts)


def test_a_tensor_whose_part_is_missing_is_refused(tmp_path):
    for start in (0, 2):
        part = Part("t", (start,), (2,), torch.float32)
        write_parts(tmp_path / f"{start}.safetensors", [(part, torch.ones(2))])
    paths = sorted(tmp_path.iterdir())
    assert TensorFiles(paths).metadata.state_dict_metadata["t"].size == (4,)
    with pytest.raises(ValueError, match="the parts of t do not make"):
        TensorFiles(paths[1:])


# --- nothing in a checkpoint is executed [24] ---


class Malice:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def old(tmp_path):
    """A copy of a checkpoint of format 1, whose metadata is a pickle."""
    return shutil.copytree(ROOT / "tests/golden/format-1/step-00000003", tmp_path / "step-00000003")


def refused(folder: Path) -> str:
    """The manifest matches, so it protects from nothing here: what is in the files is refused."""
    sign(folder)
    with pytest.raises(UserError) as error:
        verify_checkpoint(folder, ALONE)
        load_weights(folder, torch.device("cpu"))
    assert "does not match its sha256" not in str(error.value)
    return str(error.value)


def test_item_24_malicious_metadata_is_refused(old, tmp_path):
    canary = tmp_path / "canary"
    (old / ".metadata").write_bytes(pickle.dumps(Malice(canary)))
    assert "posix.mkdir has no place in a checkpoint" in refused(old)
    assert not canary.exists()
    pickle.loads((old / ".metadata").read_bytes())
    assert canary.exists(), "the attack would have worked"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_item_24_malice_inside_of_good_metadata_is_refused(old, tmp_path, protocol):
    metadata = format_1._Unpickler(open(old / ".metadata", "rb")).load()
    metadata.planner_data = Malice(tmp_path / "canary")
    (old / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    assert "has no place in a checkpoint" in refused(old)
    assert not (tmp_path / "canary").exists()


def test_item_24_an_object_in_the_place_of_a_tensor_is_refused(old, tmp_path):
    """torch unpickles BYTE_IO objects without a restriction."""
    metadata = format_1._Unpickler(open(old / ".metadata", "rb")).load()
    name = "model.embed.weight"
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    torch.save(Malice(tmp_path / "canary"), old / "__0_0.distcp")
    place = next(p for index, p in metadata.storage_data.items() if index.fqn == name)
    place.relative_path, place.offset = "__0_0.distcp", 0
    place.length = (old / "__0_0.distcp").stat().st_size
    (old / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "BytesStorageMetadata has no place in a checkpoint" in refused(old)
    assert not (tmp_path / "canary").exists()


def test_item_24_code_in_the_place_of_a_tensor_is_refused(old, tmp_path):
    for path in old.glob("*.distcp"):
        torch.save(Malice(tmp_path / "canary"), path)
    assert "verifies but cannot be loaded" in refused(old)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "unlisted"])
def test_item_24_metadata_cannot_name_a_file_outside_of_the_checkpoint(old, name):
    metadata = format_1._Unpickler(open(old / ".metadata", "rb")).load()
    next(iter(metadata.storage_data.values())).relative_path = name
    (old / ".metadata").write_bytes(pickle.dumps(metadata))
    assert f"{name!r} is not one of its files" in refused(old)


def header(**changes) -> dict:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return {"__metadata__": {"DCP_SHARDING_INFO": '{"t": {"saved_offsets": [0]}}'}, "t": entry}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        pickle.dumps({"t": 1}),
        header(data_offsets=[0, 80]),
        header(data_offsets=[-8, 0]),
        header(data_offsets=[8, 0]),
        header(shape=[3]),
        header(shape=[2.0]),
        header(shape=[True, 2]),
        header(shape="2"),
        header(dtype="pickle"),
        {"t": header()["t"]},
        {"__metadata__": {"DCP_SHARDING_INFO": "[" * 100_000}},
        [],
    ],
    ids=repr,
)
def test_item_24_a_header_that_is_none_is_refused(folder, content):
    if not isinstance(content, bytes):
        text = json.dumps(content).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(8)
    (folder / "tensors-00000-0.safetensors").write_bytes(content)
    assert "tensors-00000-0.safetensors is not a file of tensors" in refused(folder)


def test_item_24_files_that_the_manifest_does_not_list_are_not_read(folder):
    expected = checkpoint_tensors(folder)
    shutil.copy(folder / "tensors-00000-0.safetensors", folder / "tensors-00009-0.safetensors")
    config = make_config(folder.parent / "out")
    state = make_state(config, seed=9)
    load_checkpoint(folder, state, config.model_config())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.tensors().items())


# --- earlier formats [28] ---


@pytest.mark.parametrize("version", GOLDEN)
def test_item_28_a_checkpoint_of_every_format_loads_bit_for_bit(version):
    folder = ROOT / f"tests/golden/format-{version}/step-00000003"
    assert damage_here(folder) == []
    saved = read_state(folder)
    assert saved.format == version
    config = make_config("unused", **GOLDEN_SHAPE)
    state = make_state(config)
    progress = load_checkpoint(folder, state, config.model_config())
    assert (progress.iteration, progress.samples_seen) == (3, 6)
    loaded = state.tensors() | {"rng.0.cpu": torch.get_rng_state()}
    sha256 = hashlib.sha256()
    for name in sorted(loaded):
        sha256.update(
            name.encode() + loaded[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    assert sha256.hexdigest() == GOLDEN[version]


def test_item_28_a_format_of_the_future_is_named(folder):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": 9}))
    assert "has checkpoint format 9; this version of nanoMFU reads 1 and 2" in refused(folder)
