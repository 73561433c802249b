"""SentencePiece files with other settings than sentencepiece/tokenizer.model, a BPE of 1,000 pieces.

expected.json has what sentencepiece 0.2.3 makes of TEXTS with each of READ:
[SentencePieceProcessor(model_file=str(write_model(folder, *settings))).encode(text) for text in TEXTS].
"""

import struct
from pathlib import Path

from data.tokenizers.model_file import NORMAL, USER_DEFINED, _fields

FOLDER = Path(__file__).parent / "sentencepiece"
TRAINER, NORMALIZER = {3: 2, 35: 1}, {1: b"identity", 4: 0}  # BPE, byte_fallback; no remove_extra_whitespaces
SYMBOLS = {"First": USER_DEFINED, "▁▁": USER_DEFINED, "<s>": USER_DEFINED, "\n\n": USER_DEFINED}
# {name: (normalizer, {piece: its type})}
READ = {
    "as LLaMA's": (NORMALIZER, {}),
    "remove_extra_whitespaces": ({1: b"identity"}, {}),
    "no add_dummy_prefix": ({**NORMALIZER, 3: 0}, {}),
    "neither": ({1: b"identity", 3: 0}, {}),
    "a symbol of one character": ({1: b"identity"}, {"\n": USER_DEFINED, "é": USER_DEFINED}),
    "user_defined_symbols": ({**NORMALIZER, 3: 0}, SYMBOLS),
}
TEXTS = [
    *("hello world", "hello     world", "  hello", "hello  ", "", " ", "   ", " \n ", "a\tb", "▁a ▁ ▁"),
    *(
        "First Citizen:\nSpeak, speak.\n\nAll",
        "ﬁne ① ｆｕｌｌ é ½",
        "日本 🙂",
        "First  First\n\n\n<s>   </s><unk>",
    ),
    *(" a  b\n  c \n\n", "the the  the▁▁the", "\n\nFirst\n\n", "x" * 40 + " " * 40 + "=" * 40),
]


def message(fields: dict) -> bytes:
    """A protobuf message of these fields: an int as a varint, bytes and their lists with a length."""
    made = bytearray()
    for number, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            made += varint(number << 3 | (0 if isinstance(value, int) else 2))
            made += varint(value) if isinstance(value, int) else varint(len(value)) + value
    return bytes(made)


def varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def write_model(
    folder: Path, normalizer=NORMALIZER, types=None, trainer=TRAINER, scores=None, denormalizer=None
) -> Path:
    """A tokenizer.model with these settings. types, scores: of pieces; a new one takes the place of a rare
    one, the rarest first."""
    types, scores, pieces = dict(types or {}), dict(scores or {}), []
    content = (FOLDER / "tokenizer.model").read_bytes()
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append(
                (piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, NORMAL))
            )
    known = {piece for piece, *_ in pieces}
    rare = [i for i, (piece, _, kind) in enumerate(pieces) if kind == NORMAL and len(piece) > 3][::-1]
    for name in [name for name in types | scores if name not in known]:
        pieces[rare.pop(0)] = (name, 0.0, NORMAL)
    written = []
    for piece, score, kind in pieces:
        score, kind = struct.pack("<f", scores.get(piece, score)), types.get(piece, kind)
        written.append(message({1: piece.encode()}) + b"\x15" + score + message({3: kind}))
    fields = {1: written, 2: message(trainer), 3: message(normalizer)}
    if denormalizer:
        fields[5] = message(denormalizer)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(message(fields))
    return folder / "tokenizer.model"
