"""Where documents begin in token files without end-of-text ids: beside X.bin is X.bin.lengths, the number of
tokens of each document, in order, as little-endian uint32 and nothing else.

The lengths of a file add up to its tokens, so the end of a file ends a document. The trap is a reader that
does not know of lengths and takes all of the text for one document: a meta.json that names lengths has a
format of its own, which such a reader refuses.
"""

SUFFIX = ".lengths"
LENGTH_DTYPE = "uint32"
LENGTH_BYTES = 4
MOST_LENGTH = 2**32 - 1  # tokens of a document


def lengths_name(name: str) -> str:
    """The file of lengths that belongs to this token file."""
    return name + SUFFIX


def lengths_files(files: dict[str, dict]) -> dict[str, dict]:
    """{name of a file of lengths: what verified.py compares}. files: {name of a token file: what meta.json
    says of it}"""
    return {
        lengths_name(name): {"sha256": file["lengths"]["sha256"], "max_id": file["lengths"]["longest"]}
        for name, file in files.items()
        if "lengths" in file
    }


def with_lengths(files: dict[str, dict]) -> list[str]:
    """The names of the token files, and of their files of lengths."""
    return [*files, *lengths_files(files)]
