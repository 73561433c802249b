"""Decompresses the content of one file, whose size is known: no more memory than that is used, whatever the
content claims."""

import bz2
import zlib

from common.errors import UserError

CODECS = ("zstd", "gz", "bz2")


def codec(compression: str | None) -> str:
    """The name in 'zstd:3', which also has a level."""
    return (compression or "").partition(":")[0]


def decompress(content: bytes, compression: str | None, size: int) -> bytes:
    """`size` bytes, or one more if there are more. compression: one of CODECS, also with a level after a
    colon. Raises ValueError for damaged content."""
    name, most = codec(compression), size + 1
    assert name in CODECS, compression
    try:
        if name == "gz":
            return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(content, most)
        if name == "bz2":
            return bz2.BZ2Decompressor().decompress(content, most)
        return _zstd(content, most)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it cannot be decompressed as {name} ({error})") from None


def _zstd(content: bytes, most: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise UserError("compression 'zstd' needs the zstandard library: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    try:
        with decompressor.stream_reader(content, read_across_frames=True) as reader:
            return reader.read(most)
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be decompressed as zstd ({error})") from None
