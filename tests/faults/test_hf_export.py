"""An export in Hugging Face's format is whole or not there, and overwrites nothing."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from support.hf_models import hf_run, save, tensors

from common.errors import UserError
from tools import export_hf
from training.pretrained.tokenizer_files import TokenizerFiles


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save("qwen3", tmp_path_factory.mktemp("made") / "qwen3")


@pytest.fixture
def out_dir(model, run, tmp_path):
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1)
    assert run(config, f"--init_weights=hf:{model}") == 0
    return tmp_path / "out"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_that_is_not_empty_is_left_alone(out_dir, tmp_path):
    for make in (lambda path: path.write_text("mine"), lambda path: (path.mkdir(), (path / "a").touch())):
        path = tmp_path / "there"
        make(path)
        with pytest.raises(UserError, match="is there already and is not an empty folder; name a new one"):
            export_hf.main([str(out_dir), str(path)])
        path.unlink() if path.is_file() else shutil.rmtree(path)
    (tmp_path / "empty").mkdir()
    export_hf.main([str(out_dir), str(tmp_path / "empty")])
    assert "model.safetensors" in names(tmp_path / "empty")


@pytest.mark.saving
def test_a_full_disk_leaves_nothing(out_dir, tmp_path, monkeypatch):
    before = names(tmp_path)
    fails_at_its_last_file(monkeypatch, OSError(28, "No space left on device", "tokenizer.json"))
    with pytest.raises(OSError, match="No space left"):
        export_hf.main([str(out_dir), str(tmp_path / "exported")])
    assert names(tmp_path) == before


def fails_at_its_last_file(monkeypatch, error: BaseException) -> None:
    def fail(*arguments):
        raise error

    monkeypatch.setattr(TokenizerFiles, "write", fail)


def test_a_value_that_the_dtype_cannot_hold_is_refused(model, run, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    stored = tensors(folder)
    stored["model.norm.weight"][0] = 1e6
    save_file(stored, folder / "model.safetensors")
    still = {"max_iters": 1, "learning_rate": 0.0, "min_lr": 0.0}
    assert run(hf_run(tmp_path, out_dir=tmp_path / "out", **still), f"--init_weights=hf:{folder}") == 0
    with pytest.raises(UserError, match="model.norm.weight has a value that float16 cannot hold"):
        export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported"), "--dtype=float16"])
    assert not list(tmp_path.glob("exported*"))


def test_a_model_that_no_family_computes_is_not_exported(run, tmp_path):
    keys = {"arch_preset": "llama", "activation": "gelu", "n_layer": 1, "n_head": 2, "n_embd": 16, "d_ff": 32}
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1, vocab_size=64, **keys)
    assert run(config) == 0
    with pytest.raises(UserError, match="no Hugging Face model has .*='rmsnorm', activation='gelu'"):
        export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported")])
    assert not list(tmp_path.glob("exported*"))


class Killed(BaseException):
    pass


@pytest.mark.kill
def test_a_killed_export_leaves_no_folder_of_that_name(out_dir, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fails_at_its_last_file(patch, Killed())
        patch.setattr("common.durable_file.shutil.rmtree", lambda *a, **k: None)  # the process is gone
        with pytest.raises(Killed):
            export_hf.main([str(out_dir), str(tmp_path / "exported")])
    (left,) = tmp_path.glob("exported*")
    assert left.name.startswith("exported.tmp-")
    export_hf.main([str(out_dir), str(tmp_path / "exported")])
    assert "config.json" in names(tmp_path / "exported")


def test_a_damaged_checkpoint_is_not_exported(out_dir, tmp_path):
    path = next((out_dir / "checkpoints").glob("step-*/tensors-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged: .* does not match its sha256"):
        export_hf.main([str(out_dir), str(tmp_path / "exported")])
    assert not list(tmp_path.glob("exported*"))


def test_an_export_into_a_link_to_an_empty_folder_stays_in_that_folder(out_dir, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    export_hf.main([str(out_dir), str(tmp_path / "link")])
    assert (tmp_path / "link").is_symlink() and "config.json" in names(tmp_path / "disk")
