"""SentencePiece files with other settings than sentencepiece/tokenizer.model, a BPE of 1,000 pieces.

expected.json has what sentencepiece 0.2.3 makes of TEXTS with each of READ:
[SentencePieceProcessor(model_file=str(write_model(folder, *settings))).encode(text) for text in TEXTS].
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "sentencepiece"
BPE, NORMAL, USER_DEFINED = 2, 1, 4  # numbers in sentencepiece_model.proto
TRAINER, NORMALIZER = {"model_type": BPE, "byte_fallback": True}, {"remove_extra_whitespaces": False}
SYMBOLS = {"First": USER_DEFINED, "▁▁": USER_DEFINED, "<s>": USER_DEFINED, "\n\n": USER_DEFINED}
# {name: (normalizer, {piece: its type})}
READ = {
    "as LLaMA's": (NORMALIZER, {}),
    "remove_extra_whitespaces": ({}, {}),
    "no add_dummy_prefix": ({**NORMALIZER, "add_dummy_prefix": False}, {}),
    "neither": ({"add_dummy_prefix": False}, {}),
    "a symbol of one character": ({}, {"\n": USER_DEFINED, "é": USER_DEFINED}),
    "user_defined_symbols": ({**NORMALIZER, "add_dummy_prefix": False}, SYMBOLS),
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


def write_model(folder: Path, normalizer=NORMALIZER, types=None, trainer=TRAINER) -> Path:
    """A tokenizer.model with these settings. types: of pieces; a new one takes the place of a rare one, the
    rarest first."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, NormalizerSpec, TrainerSpec

    model = ModelProto.FromString((FOLDER / "tokenizer.model").read_bytes())
    model.trainer_spec.CopyFrom(TrainerSpec(**trainer))
    model.normalizer_spec.CopyFrom(NormalizerSpec(name="identity", **normalizer))
    known = {piece.piece: piece for piece in model.pieces}
    rare = [piece for piece in model.pieces if piece.type == NORMAL and len(piece.piece) > 3]
    for name, kind in (types or {}).items():
        piece = known.get(name) or rare.pop()
        piece.piece, piece.type = name, kind
        piece.score = piece.score if name in known else 0.0
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    return folder / "tokenizer.model"
