"""Any change of a file that a run reads: what is read is what was there before, or what the file says now, or
there is one UserError with the file's name. Never another exception, and never a value that nobody wrote."""

import copy
import json
import random
from dataclasses import asdict

import pytest
from support.checkpoint_parts import make_config, make_saver, make_state, save
from support.helpers import TINY, make_dataset
from support.hf_models import FAMILY
from support.hf_models import save as save_model
from support.hostile_files import DEEP, no_hang, replace  # noqa: F401 - no_hang is a fixture

from common.errors import UserError
from common.schema import read
from training.batches.packed_index import PackedIndex
from training.batches.sources import make_windows, open_sources
from training.checkpoints.saved_state import read_state
from training.checkpoints.tensor_files import mapped, read_header
from training.checkpoints.verification import Manifest, recorded_files
from training.configuration.keys import TrainConfig
from training.pretrained.folder import INDEX, Weights, list_files, read_generation

pytestmark = pytest.mark.security
FAMILIES = tuple(FAMILY)
TENSORS = "tensors-00000-0.safetensors"


def make(kind, root):
    """A folder that has a valid file of this kind."""
    if kind in FAMILIES:
        return save_model(FAMILY[kind], root / "model")
    if kind in ("index", "generation"):
        folder = save_model("qwen3", root / "model", shards="20KB")
        (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 0.6}')
        return folder
    if kind == "packing":
        dataset = make_dataset(root / "data", eot_id=0)
        config = TrainConfig(**{**TINY, "dataset": str(dataset), "packing": "truncate"})
        make_windows(open_sources(config, scan=True), config)
        return dataset / ".packed-train-32"
    config = make_config(root / "out", rope_scaling={"rope_type": "linear", "factor": 2.0})
    return save(make_saver(config, make_state(config)), 3, val_loss=1.0)


def architecture(folder):
    found = Weights("hf:x", folder).architecture()
    return found.keys, found.longest


def tensors(folder):
    return {part: mapped(part, place).tolist() for part, place in read_header(folder / TENSORS).items()}


FILES = {  # kind -> (the file's name, how it is read)
    **dict.fromkeys(FAMILIES, ("config.json", architecture)),
    "state": ("state.json", lambda folder: asdict(read_state(folder))),
    "manifest": ("manifest.json", lambda folder: asdict(Manifest(recorded_files(folder)))),
    "index": (INDEX, list_files),
    "generation": ("generation_config.json", read_generation),
    "packing": ("index.json", lambda folder: asdict(read(PackedIndex, folder / "index.json", 1 << 20))),
    "tensors": (TENSORS, tensors),
}
# beginnings of the fields that may be missing, or null: older versions, or transformers, have a default
OF_TRANSFORMERS = ("n_inner", "layer_norm", "tie_word", "num_key", "head_dim", "rms_norm", "rope_", "max_pos")
OF_OLDER = ("measure", "pretrained", "tensors", "model_config", "config.eval_batch_size")
OTHERS = [
    ...,
    None,
    True,
    False,
    0,
    -1,
    2**60,
    10**400,
    1.5,
    float("nan"),
    "x",
    "../x",
    [],
    {},
    [{}],
    {"x": {}},
]
AS_STATED = ("state", "manifest", "generation", "packing")  # what is read has the file's own form
PLAIN = ("config", "data", "stamp")  # any number may be in these: it is compared and shown
CHANGES = 500  # of each kind of file, at most


def places(value, path=()):
    """The path of everything inside a JSON value."""
    if not isinstance(value, (dict, list)):
        return
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        yield from places(inside, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(content, path, value):
    """A copy with another value there; ...: with none."""
    content = copy.deepcopy(content)
    at(content, path[:-1])[path[-1]] = value
    if value is ...:
        del at(content, path[:-1])[path[-1]]
    return content


class File:
    """A valid file, to be changed."""

    def __init__(self, kind, root):
        self.kind, (self.name, self.reader) = kind, FILES[kind]
        self.folder = make(kind, root)
        self.path = self.folder / self.name
        self.valid, self.before = self.path.read_bytes(), self.reader(self.folder)
        self.head = 8 + int.from_bytes(self.valid[:8], "little") if kind == "tensors" else 0
        self.content = json.loads(self.valid[8 : self.head] if self.head else self.valid)

    def write(self, content) -> None:
        text = json.dumps(content).encode()
        head = len(text).to_bytes(8, "little") if self.head else b""
        self.path.write_bytes(head + text + (self.valid[self.head :] if self.head else b""))

    def read(self):
        """None if it is refused."""
        try:
            return self.reader(self.folder)
        except UserError as error:
            assert self.name in str(error) and len(str(error)) < 1000, error
            return None

    def says(self, found, path, value) -> bool:
        """Whether what was read is what was there before, or that with this value."""
        if found in (None, self.before):
            return True
        was = None if self.kind == "generation" or path[0] in PLAIN else at(self.content, path)
        if type(was) in (int, float) and (type(value) is bool or value != value or value == 10**400):
            return False
        if type(was) is int and value in (-1, 2**60):
            return False
        return self.kind in AS_STATED and repr(found) == repr(changed(self.before, path, value))

    def may_be(self, path, value) -> bool:
        """Whether a file with this value is another valid one."""
        if self.kind == "index":
            return value in (..., {})  # fewer tensors
        of_its_type = self.kind in FAMILIES and type(value) is type(at(self.content, path))
        has_default = ".".join(map(str, path)).startswith(
            OF_TRANSFORMERS if self.kind in FAMILIES else OF_OLDER
        )
        return of_its_type or has_default and value in (None, ..., {})


@pytest.fixture(params=FILES)
def file(request, tmp_path):
    return File(request.param, tmp_path)


def test_a_field_that_is_missing_or_of_another_type_or_out_of_range(file):
    changes = [(path, value) for path in places(file.content) for value in OTHERS]
    refused = 0
    for path, value in random.Random(1).sample(changes, min(CHANGES, len(changes))):
        file.write(changed(file.content, path, value))
        found = file.read()
        refused += found is None
        assert file.says(found, path, value) or file.may_be(path, value), (path, value, found)
    assert refused > len(changes) / 100 or file.kind == "generation"


def test_a_field_that_nobody_knows_changes_nothing(file):
    for path in [(), *places(file.content)]:
        if isinstance(at(file.content, path), dict):
            file.write(changed(file.content, (*path, "colour"), "red"))
            found = file.read()
            as_stated = file.kind in AS_STATED and changed(file.before, (*path, "colour"), "red")
            assert found in (None, file.before) or repr(found) == repr(as_stated), path


def test_a_file_that_was_cut_or_that_holds_other_bytes(file):
    generator = random.Random(2)
    for _ in range(40):
        file.path.write_bytes(file.valid[: generator.randrange(len(file.valid))])
        assert file.read() in (None, file.before)
    for _ in range(200):  # another digit may be another valid file, which hashes find
        flipped = bytearray(file.valid)
        flipped[generator.randrange(len(flipped))] ^= 1 << generator.randrange(8)
        file.path.write_bytes(flipped)
        file.read()
    for text in ("", "[]", "null", "{", DEEP, "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\xff", "{}"):
        file.path.write_text(text, encoding="latin-1")
        assert file.read() in (None, {}), text


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link"])
def test_what_is_no_file(file, kind):
    replace(file.path, kind)
    if (file.kind, kind) != ("tensors", "pipe"):  # verification.py opens none that is no regular file
        assert file.read() is None
