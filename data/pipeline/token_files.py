"""Token files: the one place that writes a dataset, and that loads its tokenizer back.

A dataset is a folder. train.bin and val.bin are flat little-endian token ids and nothing else; meta.json says
what they are and is written last, so a folder that has a meta.json holds a complete dataset.
The trap: numpy narrows 70000 to uint16 as 4464 without a word, so every id is checked before it is stored.
"""

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

SPLITS = ("train", "val")
FORMAT = 1  # of meta.json; a reader refuses the formats that it does not know
UINT16_IDS = 65536  # the largest vocabulary whose ids, 0 to 65535, fit in two bytes
DATA_DIR = Path(__file__).resolve().parents[1]


class DataError(ValueError):
    """Something the user can fix; data/*/prepare.py shows the message without a traceback."""


class EncodeError(Exception):
    """A text that the tokenizer's library cannot encode."""


# --- writing ---


class TokenWriter:
    """Checks, narrows and appends ids to one temporary file, and counts what it wrote."""

    def __init__(self, path: Path, dtype: str, vocab_size: int):
        self.file = open(path, "wb")
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.vocab_size = vocab_size
        self.tokens = 0
        self.max_id = 0
        self.sha256 = hashlib.sha256()

    def write(self, ids: np.ndarray | list[int]):
        if len(ids) == 0:
            return
        ids = np.asarray(ids)
        assert ids.ndim == 1 and ids.dtype.kind in "iu", (ids.shape, ids.dtype)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise DataError(
                f"token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1}) and could be stored "
                f"as another token; vocab_size={self.vocab_size} is not that of the tokenizer"
            )
        stored = ids.astype(self.dtype).tobytes()
        self.file.write(stored)
        self.sha256.update(stored)
        self.tokens += len(ids)
        self.max_id = max(self.max_id, high)

    def finish(self) -> dict:
        self.file.close()
        return {"tokens": self.tokens, "sha256": self.sha256.hexdigest(), "max_id": self.max_id}


def write_dataset(
    folder: str | Path,
    splits: Mapping[str, Iterable] | Iterable[tuple[str, np.ndarray | list[int]]],
    vocab_size: int,
    tokenizer: dict,
    eot_id: int | None,
    source: str,
) -> dict:
    """Write train.bin, val.bin, meta.json and meta.pkl, all or nothing; returns what meta.json holds.

    splits is {"train": chunks of ids, "val": chunks of ids}, or one iterator of (split, ids) where a single
    pass over the text feeds both; one chunk is in memory at a time. tokenizer is the .meta of one of those
    below. eot_id is the id that ends each document in the files, None when documents are not marked.
    A dataset that is already there stays whole until the new one is complete on disk.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(splits, Mapping):
        splits = ((split, ids) for split, chunks in splits.items() for ids in chunks)
    dtype = smallest_dtype(vocab_size)

    names = [f"{split}.bin" for split in SPLITS] + ["meta.pkl"]
    if tokenizer["kind"] == "tokenizers":
        names.append("tokenizer.json")
    names.append("meta.json")  # last
    temporary = {name: folder / f"{name}.tmp" for name in names}
    writers = {split: TokenWriter(temporary[f"{split}.bin"], dtype, vocab_size) for split in SPLITS}
    try:
        for split, ids in splits:
            writers[split].write(ids)
        files = {f"{split}.bin": writers[split].finish() for split in SPLITS}
        for name, written in files.items():
            if written["tokens"] == 0:
                raise DataError(
                    f"{name} of {folder} would hold no tokens; the input is too small to be split"
                )

        if tokenizer["kind"] == "tokenizers":
            temporary["tokenizer.json"].write_bytes(tokenizer_json(tokenizer["file"]).encode())
            tokenizer = {
                **tokenizer,
                "file": "tokenizer.json",
                "sha256": _sha256(temporary["tokenizer.json"]),
            }
        meta = describe(vocab_size, tokenizer, eot_id, source, files)
        temporary["meta.json"].write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        temporary["meta.pkl"].write_bytes(nanogpt_meta(vocab_size, tokenizer))
        for name in names:
            sync(temporary[name])

        # from here the folder is between two datasets: the old meta.json goes before the first file changes
        (folder / "meta.json").unlink(missing_ok=True)
        for name in names:
            os.replace(temporary[name], folder / name)
    finally:
        for writer in writers.values():
            writer.file.close()
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return meta


def describe(vocab_size: int, tokenizer: dict, eot_id: int | None, source: str, files: dict) -> dict:
    """What meta.json holds; files is {name: what its TokenWriter counted}."""
    return {
        "format": FORMAT,
        "dtype": smallest_dtype(vocab_size),
        "vocab_size": vocab_size,
        "eot_id": eot_id,
        "tokenizer": tokenizer,
        "source": source,
        "files": files,
    }


def smallest_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= UINT16_IDS else "uint32"


def nanogpt_meta(vocab_size: int, tokenizer: dict) -> bytes:
    """What nanoGPT's readers expect in meta.pkl. Ours never read it: a pickle runs any code."""
    meta = {"vocab_size": vocab_size}
    if tokenizer["kind"] == "char":
        chars = tokenizer["chars"]
        meta["itos"] = dict(enumerate(chars))
        meta["stoi"] = {c: i for i, c in enumerate(chars)}
    return pickle.dumps(meta)


def sync(path: Path):
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- reading what was written ---


def read_meta(folder: str | Path) -> dict:
    """The checked meta.json of a dataset folder."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise DataError(f"{path} does not exist, so {folder} holds no complete dataset; run its prepare.py")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); run its prepare.py again") from error
    if meta.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {meta.get('format')!r}, this code reads {FORMAT}; run its prepare.py"
        )
    return meta


def has_dataset(folder: str | Path, source: str) -> bool:
    """Whether the folder already holds a complete dataset that was made from this source."""
    try:
        meta = read_meta(folder)
        load_tokenizer(folder)
    except DataError:
        return False
    itemsize = np.dtype(meta["dtype"]).itemsize
    paths = {Path(folder) / name: written["tokens"] * itemsize for name, written in meta["files"].items()}
    return meta["source"] == source and all(
        path.is_file() and path.stat().st_size == size for path, size in paths.items()
    )


def run(main: Callable[[], None]):
    """Run a prepare.py: an error that the user can fix is one line and exit status 1."""
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")


def count_tokens(meta: dict) -> dict[str, int]:
    """Tokens of each split, over all of its files."""
    return {
        split: sum(file["tokens"] for name, file in meta["files"].items() if name.startswith(split))
        for split in SPLITS
    }


def report(meta: dict, folder: str | Path, config: str | None = None):
    """Print where the dataset is, what it holds, and the command that trains on it."""
    config = config or f"config/quickstart.py --vocab_size={meta['vocab_size']}"
    folder = Path(folder).resolve()
    dataset = folder.name if folder.parent == DATA_DIR else folder
    tokens = ", ".join(f"{split} {count:,}" for split, count in count_tokens(meta).items())
    print(f"in     {folder}")
    print(f"tokens {tokens}, as {meta['dtype']}")
    print(f"vocab  {meta['vocab_size']:,}, end-of-text id {meta['eot_id']}")
    print(f"next   python train.py {config} --dataset={dataset}")


# --- tokenizers: one class a kind, all with encode, encode_arrays, decode, token_id, vocab_size and meta ---
#
# What a text spells is text: '<|endoftext|>' inside a document never becomes the end-of-text id.
# An id past the vocabulary (models pad theirs) decodes to nothing.


class CharTokenizer:
    def __init__(self, chars: str):
        self.chars = chars
        self.ids = {char: i for i, char in enumerate(chars)}
        self.vocab_size = len(chars)
        self.meta = {"kind": "char", "name": "char", "chars": chars}

    def encode(self, text: str) -> list[int]:
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise DataError(
                f"character {error.args[0]!r} is not one of this dataset's {self.vocab_size}; leave it out"
            ) from None

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids if i < self.vocab_size)

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def use_fast_encoder(self, verify: bool = True) -> bool:
        return False


def tiktoken_ids(encoding, text: str) -> np.ndarray:
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except BaseException as error:
        # its regular expressions overflow on a million spaces, with a panic, which is no Exception
        if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            raise EncodeError(f"tiktoken cannot encode it ({error})") from None
        raise


class TiktokenTokenizer:
    def __init__(self, name: str):
        try:
            import tiktoken
        except ImportError:
            raise DataError(f"the {name!r} tokenizer needs tiktoken: pip install tiktoken") from None
        if name not in tiktoken.list_encoding_names():
            raise DataError(
                f"no tokenizer {name!r}: not a tokenizer.json, not a folder that holds one, and not one of "
                f"tiktoken's, which are {', '.join(tiktoken.list_encoding_names())}"
            )
        try:
            self.encoding = tiktoken.get_encoding(name)
        except OSError as error:  # requests' errors are OSErrors too
            cache = os.environ.get("TIKTOKEN_CACHE_DIR", "not set")
            raise DataError(
                f"tiktoken could not download its {name!r} files ({type(error).__name__}). Without a "
                f"network: load it once on a machine that has one, with TIKTOKEN_CACHE_DIR=FOLDER in the "
                f"environment; copy FOLDER here and set TIKTOKEN_CACHE_DIR to it (now: {cache})"
            ) from error
        self.vocab_size = self.encoding.n_vocab
        self.meta = {"kind": "tiktoken", "name": name}

    def encode(self, text: str) -> list[int]:
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        return [tiktoken_ids(self.encoding, text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode([int(i) for i in ids if i < self.vocab_size])

    def token_id(self, token: str) -> int | None:
        try:
            return self.encoding.encode_single_token(token)
        except KeyError:
            return None

    def use_fast_encoder(self, verify: bool = True) -> bool:
        return False  # it is


def tokenizer_json(path: str | Path) -> str:
    """The content of a tokenizer.json, made from a tokenizer.model or a vocab.json where the path is one."""
    if Path(path).suffix == ".model":
        from data.tokenizers.model_file import convert
    elif Path(path).name == "vocab.json":
        from data.tokenizers.merges import convert
    else:
        from data.tokenizers.model_file import restore_prefix

        return restore_prefix(Path(path).read_bytes().decode())  # newlines as they are
    return convert(Path(path))


class FileTokenizer:
    """A tokenizer.json, as the `tokenizers` library and Hugging Face models have it, or what makes one.

    Added tokens that the file marks "special": true stay text. Those it marks false are vocabulary like any
    other and keep their ids: the runs of spaces of GPT-NeoX, but also <think> of Qwen3.
    """

    fast = None  # the encoder of use_fast_encoder()

    def __init__(self, path: str | Path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DataError(f"{path} needs the tokenizers library: pip install tokenizers") from None
        path = Path(path)
        try:
            self.tokenizer = Tokenizer.from_str(tokenizer_json(path))
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{path} is not a tokenizer.json that can be read: {error}") from error
        self.tokenizer.encode_special_tokens = True  # the library's name for "as text"
        self.tokenizer.no_truncation()  # a length limit in the file would drop the rest of each document
        self.tokenizer.no_padding()
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.meta = {"kind": "tokenizers", "name": path.resolve().parent.name, "file": str(path)}

    def encode(self, text: str) -> list[int]:
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        arrays = [None if self.fast is None else self.fast.encode(text) for text in texts]
        left = [text for text, ids in zip(texts, arrays, strict=True) if ids is None]
        # fast here: without the offsets of tokens in the text
        encodings = iter(self.tokenizer.encode_batch_fast(left, add_special_tokens=False) if left else [])
        return [np.array(next(encodings).ids, dtype=np.uint32) if ids is None else ids for ids in arrays]

    def use_fast_encoder(self, verify: bool = True) -> bool:
        """Make the same ids several times as fast, if it is certain that they are the same."""
        from data.tokenizers.fast_encoder import FastEncoder, Unsuitable

        try:
            fast = FastEncoder(self.tokenizer)
            if verify:
                fast.verify(self.tokenizer)
                print("ids are made by tiktoken's loop; the tokenizers library was found to make the same")
        except Unsuitable as reason:
            print(f"ids are made by the tokenizers library; the faster way is not certain, as {reason}")
            return False
        self.fast = fast
        return True

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)


def open_tokenizer(name: str) -> TiktokenTokenizer | FileTokenizer:
    """What a user asked for: a tokenizer.json or .model, a folder of its files, or a name of tiktoken's."""
    path = Path(name)
    for file in (path / "tokenizer.json", path / "tokenizer.model", path / "vocab.json", path):
        if file.is_file():
            return FileTokenizer(file)
    if path.is_dir():
        raise DataError(
            f"{path} holds no tokenizer.json, tokenizer.model or vocab.json; AutoTokenizer"
            f".from_pretrained(...).save_pretrained({str(path)!r}) of transformers writes a tokenizer.json"
        )
    return TiktokenTokenizer(name)


def load_tokenizer(folder: str | Path) -> CharTokenizer | TiktokenTokenizer | FileTokenizer:
    """The tokenizer of a prepared dataset, from its meta.json: .encode(text) and .decode(ids)."""
    meta = read_meta(folder)["tokenizer"]
    if meta["kind"] == "char":
        return CharTokenizer(meta["chars"])
    if meta["kind"] == "tiktoken":
        return TiktokenTokenizer(meta["name"])
    if meta["kind"] != "tokenizers":
        raise DataError(
            f"{folder}/meta.json has tokenizer kind {meta['kind']!r}, not char, tiktoken or tokenizers"
        )
    if os.path.basename(meta["file"]) != meta["file"]:
        raise DataError(f"the tokenizer of {folder}/meta.json, {meta['file']!r}, is outside of {folder}")
    path = Path(folder) / meta["file"]
    if not path.is_file() or _sha256(path) != meta["sha256"]:
        state = "has changed since" if path.is_file() else "is gone, but"
        raise DataError(
            f"{path} {state} the tokens were made with it; put the file back, or run prepare.py again"
        )
    return FileTokenizer(path)
