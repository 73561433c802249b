"""The ids of a tokenizer.json at several times its library's speed: its words and merges, run by tiktoken.

Both libraries cut a text into words by a regular expression and join neighbours within a word, lowest rank
first. The trap: they need not agree. `tokenizers` joins the pairs that the file lists, tiktoken any whose
join is a token, and each has Unicode tables of its own. So only the kinds of file are taken for which
equality can be decided, and verify() decides it, on the libraries that are installed:

- Joins. Inside a stretch of a word they do not depend on what is around it, until one crosses its border. So
  neighbours that may join to token t are where t's own text stood just before it became t: one pair. If both
  libraries make t of its text, or neither does, for every t, they see the same pairs in every word.
- Words. Where the three known expressions cut depends on the class of each character alone, and a vocabulary
  whose tokens show the cuts tells the class of every character.

Any other file keeps its library, and so does a document that spells an added token.
"""

import json

import numpy as np

from data.pipeline.token_files import EncodeError, tiktoken_ids
from data.tokenizers.merges import QWEN_PATTERN
from data.tokenizers.model_file import DUMMY_PREFIX, LLAMA3_PATTERN, SPACE, byte_letters

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SENTENCE_PATTERN = f"{SPACE}*[^{SPACE}]+|{SPACE}+"  # no piece goes on after a space that follows a letter
CHARACTERS = [*range(0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE01F0)]  # no others are assigned
CONTRACTED = 0x2200  # from here on no character is a form of an ASCII letter


class Unsuitable(Exception):
    """Why a tokenizer keeps its library."""


class FastEncoder:
    """Made of a `tokenizers.Tokenizer` that takes special tokens as text. Trust it after verify()."""

    def __init__(self, tokenizer):
        import tiktoken

        content = json.loads(tokenizer.to_str())
        self.model = content["model"]
        self.added = [token["content"] for token in content["added_tokens"] if not token["special"]]
        self.sentence = content["normalizer"] == DUMMY_PREFIX and content["pre_tokenizer"] is None
        options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if self.model["type"] != "BPE" or any(self.model[option] for option in options):
            raise Unsuitable("it is not a plain byte-pair encoder")
        if not self.sentence and content["normalizer"] not in (None, {"type": "NFC"}):
            raise Unsuitable("it changes the text in a way of its own")
        self.normalize = None
        if content["normalizer"] == {"type": "NFC"}:
            self.normalize = tokenizer.normalizer.normalize_str
        self.pattern = SENTENCE_PATTERN if self.sentence else word_pattern(content["pre_tokenizer"])
        self.pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in self.model["merges"]]
        self.tokens = (sentence_tokens if self.sentence else byte_tokens)(self.model, joins(self.pairs))
        self.ranks = {text: rank for rank, text in enumerate(self.tokens)}
        self.counts = np.array([len(ids) for ids in self.tokens.values()], dtype=np.intp)
        self.ids = np.zeros((len(self.tokens), 3), dtype=np.uint32)
        for rank, ids in enumerate(self.tokens.values()):
            self.ids[rank, : len(ids)] = ids
        self.encoding = tiktoken.Encoding(
            "fast", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={}
        )

    def encode(self, text: str) -> np.ndarray | None:
        """The ids of a text; None where the library must make them."""
        if any(token in text for token in self.added):
            return None
        if self.sentence and text:
            text = SPACE + text.replace(" ", SPACE)
        if self.normalize is not None and not text.isascii():
            text = self.normalize(text)
            if any(token in text for token in self.added):
                return None
        try:
            ranks = tiktoken_ids(self.encoding, text)
        except EncodeError:
            return None
        counts = self.counts[ranks] if self.sentence else None
        if counts is None or counts.max(initial=1) == 1:
            return self.ids[ranks, 0]
        ranks = np.repeat(ranks, counts)
        return self.ids[ranks, np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)]

    def verify(self, tokenizer):
        """Raises Unsuitable unless every text has the ids of the library."""
        self._verify_joins()
        if not self.sentence:
            verify_words(tokenizer.pre_tokenizer, self.pattern)

    def _verify_joins(self):
        from tokenizers import Tokenizer, models

        model, vocab = self.model, self.model["vocab"]
        options = {key: model[key] for key in ("unk_token", "fuse_unk", "byte_fallback")}
        library = Tokenizer(models.BPE(vocab=vocab, merges=self.pairs, **options))
        made = joins(self.pairs)
        encodings = library.encode_batch_fast(made, add_special_tokens=False)
        missed = [text for text, ids in zip(made, encodings, strict=True) if ids.ids != [vocab[text]]]
        if model["ignore_merges"]:  # there a word that is a token is that token, made or not
            letters = {letter: bytes([byte]) for byte, letter in byte_letters().items()}
            missed += [text for text in vocab.keys() - set(made) if len(text) > 1]
            missed = [text for text in missed if self._merge(b"".join(letters[c] for c in text))]
        if missed:
            raise Unsuitable(f"its merges do not make its token {missed[0]!r}")

    def _merge(self, text: bytes) -> bool:
        """Whether the ranks alone join the whole text."""
        parts = [text[i : i + 1] for i in range(len(text))]
        while len(parts) > 1:
            pairs = [self.ranks.get(a + b, len(self.ranks)) for a, b in zip(parts, parts[1:], strict=False)]
            best = pairs.index(min(pairs))
            if pairs[best] == len(self.ranks):
                return False
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return True


# --- the tokens: {bytes: ids}, lowest rank first ---


def joins(pairs: list[tuple[str, str]]) -> list[str]:
    """What the merges make, lowest rank first."""
    made = ["".join(pair) for pair in pairs]
    once = list(dict.fromkeys(made))
    if len(once) != len(made) - sum(a == b for a, b in zip(made, made[1:], strict=False)):
        raise Unsuitable("it ranks the merges to one token apart")
    return once


def byte_tokens(model: dict, made: list[str]) -> dict[bytes, list[int]]:
    """Of a vocabulary that writes bytes as letters."""
    letters = {letter: bytes([byte]) for byte, letter in byte_letters().items()}
    vocab = model["vocab"]
    if not letters.keys() <= vocab.keys() or not all(letters.keys() >= set(text) for text in vocab):
        raise Unsuitable("its tokens are not bytes")
    order = dict.fromkeys([*letters, *made, *(vocab if model["ignore_merges"] else [])])
    return {b"".join(letters[letter] for letter in text): [vocab[text]] for text in order}


def sentence_tokens(model: dict, made: list[str]) -> dict[bytes, list[int]]:
    """Of a SentencePiece vocabulary, whose merges begin with characters: bytes first join to these. What is
    left of an unknown one has an id for each byte."""
    vocab = model["vocab"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    if not model["byte_fallback"] or not vocab.keys() >= set(fallback) or model["ignore_merges"]:
        raise Unsuitable("it has no token for each byte")
    if any(SPACE in text.lstrip(SPACE) for text in made):
        raise Unsuitable("its tokens go on after a space")
    tokens = {bytes([byte]): [vocab[text]] for byte, text in enumerate(fallback)}
    for char in (text for text in vocab if len(text) == 1):
        text = char.encode()
        for end in range(2, len(text)):
            tokens[text[:end]] = [vocab[fallback[byte]] for byte in text[:end]]
        tokens[text] = [vocab[char]]
    return tokens | {text.encode(): [vocab[text]] for text in made}


# --- the words ---


def word_pattern(pre_tokenizer: dict | None) -> str:
    """The regular expression, if it is one of the three."""
    first, *rest = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    level = rest[0] if len(rest) == 1 else first
    if level.get("type") != "ByteLevel" or level["add_prefix_space"] or level["use_regex"] == bool(rest):
        raise Unsuitable("it cuts words in a way of its own")
    if not rest:
        return GPT2_PATTERN
    for pattern in (LLAMA3_PATTERN, QWEN_PATTERN):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        if first == split:
            return pattern
    raise Unsuitable("it cuts words in a way of its own")


def verify_words(pre_tokenizer, pattern: str):
    """Raises Unsuitable unless both libraries cut alike, whatever the characters."""
    import tiktoken
    from tokenizers import Tokenizer, models

    letters = byte_letters()
    single = [letters[byte] for byte in range(256)]
    pairs = dict.fromkeys(pair for probe in "a1!" for x in single for pair in ((probe, x), (x, probe)))
    vocab = {text: rank for rank, text in enumerate([*single, *(a + b for a, b in pairs)])}
    library = Tokenizer(models.BPE(vocab=vocab, merges=list(pairs)))
    library.pre_tokenizer = pre_tokenizer
    back = {letter: bytes([byte]) for byte, letter in letters.items()}
    ranks = {b"".join(back[letter] for letter in text): rank for text, rank in vocab.items()}
    encoding = tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    chars = [chr(code) for code in CHARACTERS]
    probes = [f"a{char}1{char}!{char}a\n" for char in chars]
    contracted = "'{0}a 'r{0}a 'v{0}a 'l{0}a '{0}ea '{0}la\n"
    probes += [contracted.format(char) for char in chars[:CONTRACTED]]
    texts = ["".join(probes[i : i + 1024]) for i in range(0, len(probes), 1024)]
    encodings = library.encode_batch_fast(texts, add_special_tokens=False)
    for text, ours in zip(texts, encodings, strict=True):
        if ours.ids != encoding.encode_ordinary(text):
            raise Unsuitable(f"the libraries differ on a character from {text[1]!r} on")
