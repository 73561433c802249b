"""Trains a byte-level BPE tokenizer: it encodes any text, and the same texts give the same tokenizer."""

from collections.abc import Iterable

from common.errors import UserError

EOT = "<|endoftext|>"
EOT_ID = 0  # a special token comes first
LEAST_IDS = 257  # the 256 bytes and the end-of-text token


def train_bpe(texts: Iterable[str], vocab_size: int, eot: str = EOT) -> tuple[str, int]:
    """The content of a tokenizer.json, and how many ids it has: fewer than vocab_size if the texts repeat too
    few pairs of tokens."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError("training a tokenizer needs the tokenizers library: pip install tokenizers") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs once is no pattern of the text
        special_tokens=[eot],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size()
