"""Makes the ids of a tokenizer.json by tiktoken's loop, several times as fast as the tokenizers library.

Both libraries cut a text into words by a regular expression. Within a word, both merge neighboring tokens,
lowest rank first. The trap: the two may give different ids. `tokenizers` merges the pairs that the file
lists, tiktoken merges any pair whose text together is a token, and each has its own Unicode tables. So only
kinds of tokenizer.json are accepted whose ids can be proved equal, and verify() proves it with the libraries
that are installed:

- Merges. Until a merge crosses the border of a part of a word, the merges inside this part do not depend on
  what is around it. So when two neighbors are about to be merged to token t, they are the same pair that t's
  own text, encoded alone, has just before it becomes t. Hence if, for every t, both libraries encode t's text
  to t, or neither does, then they merge the same pairs in every word.
- Words. Where the three known expressions cut depends only on the class of each character (letter, digit,
  space and so on). Both libraries encode a text that contains every character, with a vocabulary that makes
  every cut visible in the ids; equal ids mean that they have the same classes.

Any other tokenizer.json is left to the tokenizers library, and so is a document that contains an added token.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.model_file import DUMMY_PREFIX, SPACE, byte_letters
from data.tokenizers.tiktoken_tokenizer import EncodeError, tiktoken_ids
from data.tokenizers.tokenizer import SubwordTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit is a word
SENTENCEPIECE_PATTERN = f"{SPACE}*[^{SPACE}]+|{SPACE}+"  # in no piece does a space follow another character
CHARACTERS = [*range(0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE01F0)]  # all that Unicode assigns
CASE_VARIANTS_END = 0x2200  # from here on, no character is an upper or lower case form of an ASCII letter


class Unsuitable(Exception):
    """Why the ids of a tokenizer.json must be made by the tokenizers library."""


def use_fast_encoder(tokenizer: SubwordTokenizer, verify: bool = True) -> bool:
    """Lets it make the same ids several times as fast, if it is certain that they are the same."""
    if not isinstance(tokenizer, FileTokenizer):
        return False  # tiktoken is the fast encoder already
    try:
        fast = FastEncoder(tokenizer.tokenizer)
        if verify:
            fast.verify(tokenizer.tokenizer)
            print("ids are made by tiktoken's loop; the tokenizers library was found to make the same")
    except Unsuitable as reason:
        print(f"ids are made by the tokenizers library; the faster way is not certain, as {reason}")
        return False
    tokenizer.fast = fast.encode
    return True


class FastEncoder:
    """Made from a `tokenizers.Tokenizer` that encodes special tokens as ordinary text. Its ids are certain
    only after verify()."""

    def __init__(self, tokenizer: "Tokenizer"):
        import tiktoken

        content = json.loads(tokenizer.to_str())
        self.model: dict[str, Any] = content["model"]
        self.added = [token["content"] for token in content["added_tokens"] if not token["special"]]
        self.sentencepiece = content["normalizer"] == DUMMY_PREFIX and content["pre_tokenizer"] is None
        options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if self.model["type"] != "BPE" or any(self.model[option] for option in options):
            raise Unsuitable("it is not a plain byte-pair encoder")
        if not self.sentencepiece and content["normalizer"] not in (None, {"type": "NFC"}):
            raise Unsuitable("it changes the text in a way of its own")
        self.normalize = None
        if content["normalizer"] == {"type": "NFC"}:
            self.normalize = tokenizer.normalizer.normalize_str
        self.pattern = SENTENCEPIECE_PATTERN if self.sentencepiece else word_pattern(content["pre_tokenizer"])
        self.pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in self.model["merges"]]
        self.tokens = (sentencepiece_tokens if self.sentencepiece else byte_tokens)(
            self.model, merged_tokens(self.pairs)
        )
        self.ranks = {text: rank for rank, text in enumerate(self.tokens)}
        self.counts = np.array([len(ids) for ids in self.tokens.values()], dtype=np.intp)
        self.ids = np.zeros((len(self.tokens), 3), dtype=np.uint32)
        for rank, ids in enumerate(self.tokens.values()):
            self.ids[rank, : len(ids)] = ids
        self.encoding = tiktoken.Encoding(
            "fast", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={}
        )

    def encode(self, text: str) -> np.ndarray | None:
        """The ids of a text; None where the tokenizers library must make them."""
        if any(token in text for token in self.added):
            return None
        if self.sentencepiece and text:
            text = SPACE + text.replace(" ", SPACE)
        if self.normalize is not None and not text.isascii():
            text = self.normalize(text)
            if any(token in text for token in self.added):
                return None
        try:
            ranks = tiktoken_ids(self.encoding, text)
        except EncodeError:
            return None
        counts = self.counts[ranks] if self.sentencepiece else None
        if counts is None or counts.max(initial=1) == 1:
            return self.ids[ranks, 0]
        ranks = np.repeat(ranks, counts)
        return self.ids[ranks, np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)]

    def verify(self, tokenizer: "Tokenizer") -> None:
        """Raises Unsuitable unless every text gets the same ids as from the tokenizers library."""
        self._verify_merges()
        if not self.sentencepiece:
            verify_words(tokenizer.pre_tokenizer, self.pattern)

    def _verify_merges(self) -> None:
        from tokenizers import Tokenizer, models

        model, vocab = self.model, self.model["vocab"]
        options = {key: model[key] for key in ("unk_token", "fuse_unk", "byte_fallback")}
        library = Tokenizer(models.BPE(vocab=vocab, merges=self.pairs, **options))
        made = merged_tokens(self.pairs)
        encodings = library.encode_batch_fast(made, add_special_tokens=False)
        missed = [text for text, ids in zip(made, encodings, strict=True) if ids.ids != [vocab[text]]]
        if model["ignore_merges"]:  # a word that is a token gets its id, even if no merges make it
            letters = {letter: bytes([byte]) for byte, letter in byte_letters().items()}
            missed += [text for text in vocab.keys() - set(made) if len(text) > 1]
            missed = [text for text in missed if self._is_merged(b"".join(letters[c] for c in text))]
        if missed:
            raise Unsuitable(f"its merges do not make its token {missed[0]!r}")

    def _is_merged(self, text: bytes) -> bool:
        """Whether the ranks alone merge the whole text to one token."""
        parts = [text[i : i + 1] for i in range(len(text))]
        while len(parts) > 1:
            pairs = [self.ranks.get(a + b, len(self.ranks)) for a, b in zip(parts, parts[1:], strict=False)]
            best = pairs.index(min(pairs))
            if pairs[best] == len(self.ranks):
                return False
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return True


# --- the tokens: {bytes: ids}, lowest rank first ---


def merged_tokens(pairs: list[tuple[str, str]]) -> list[str]:
    """The tokens that the merges make, lowest rank first."""
    made = ["".join(pair) for pair in pairs]
    once = list(dict.fromkeys(made))
    if len(once) != len(made) - sum(a == b for a, b in zip(made, made[1:], strict=False)):
        raise Unsuitable("it ranks the merges to one token apart")
    return once


def byte_tokens(model: dict, made: list[str]) -> dict[bytes, list[int]]:
    """The tokens of a vocabulary that writes each byte as a letter (byte_letters)."""
    letters = {letter: bytes([byte]) for byte, letter in byte_letters().items()}
    vocab = model["vocab"]
    if not letters.keys() <= vocab.keys() or not all(letters.keys() >= set(text) for text in vocab):
        raise Unsuitable("its tokens are not bytes")
    order = dict.fromkeys([*letters, *made, *(vocab if model["ignore_merges"] else [])])
    return {b"".join(letters[letter] for letter in text): [vocab[text]] for text in order}


def sentencepiece_tokens(model: dict, made: list[str]) -> dict[bytes, list[int]]:
    """The tokens of a SentencePiece vocabulary. Its merges begin with characters, tiktoken's with bytes, so
    the lowest ranks merge bytes to characters. Bytes that make no known character keep an id each."""
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
    """The regular expression that cuts a text into words, if it is one of the three known ones."""
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


def verify_words(pre_tokenizer: Any, pattern: str) -> None:
    """Raises Unsuitable unless both libraries cut at the same places, whatever the characters.

    The vocabulary is the 256 bytes and every pair of a byte with a, 1 or !, so that the ids show the cuts.
    """
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
    contractions = "'{0}a 'r{0}a 'v{0}a 'l{0}a '{0}ea '{0}la\n"  # {0} for each letter of 's, 're, 'll ...
    probes += [contractions.format(char) for char in chars[:CASE_VARIANTS_END]]
    texts = ["".join(probes[i : i + 1024]) for i in range(0, len(probes), 1024)]
    encodings = library.encode_batch_fast(texts, add_special_tokens=False)
    for text, ours in zip(texts, encodings, strict=True):
        if ours.ids != encoding.encode_ordinary(text):
            raise Unsuitable(f"the libraries differ on a character from {text[1]!r} on")
