"""Reads compressed files as a stream, with little memory.

The trap: zstandard's own reader takes the middle of a frame for its end, so an archive that was cut off reads
like a shorter one; ZstdFile knows the difference.
"""

import bz2
import gzip
import io
from typing import Any, BinaryIO

from common.errors import UserError


class ZstdFile(io.RawIOBase):
    """Decompresses one or more zstd frames; EOFError if the last one is cut off."""

    def __init__(self, raw: BinaryIO):
        try:
            import zstandard
        except ImportError:
            raise UserError("zstd archives need the zstandard library: pip install zstandard") from None
        self.source, self.output = raw, memoryview(b"")
        self.frame: zstandard.ZstdDecompressionObj | None = None
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as zstd --long needs

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.output:
            data = self.frame.unused_data if self.frame is not None and self.frame.eof else b""
            data = data or self.source.read(16 << 10)  # few bytes, because they may unpack to very many
            if not data:
                if self.frame is not None and not self.frame.eof:
                    raise EOFError("the zstd archive ends in the middle of a frame")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = self.decompressor.decompressobj()
            self.output = memoryview(self.frame.decompress(data))
        count = min(len(buffer), len(self.output))
        buffer[:count] = self.output[:count]
        self.output = self.output[count:]
        return count


CODECS: dict[str, Any] = {
    "zstd": lambda raw: io.BufferedReader(ZstdFile(raw), 1 << 20),
    "gz": gzip.open,
    "bz2": bz2.open,
}


def open_decompressed(raw: BinaryIO, codec: str | None) -> BinaryIO:
    """The content of a file that is open; codec: one of CODECS, or None."""
    return CODECS[codec](raw) if codec else raw


def is_disk_error(error: Exception) -> bool:
    """Whether the system failed to read, which may work later; otherwise the content of the file is wrong."""
    return isinstance(error, OSError) and error.errno is not None
