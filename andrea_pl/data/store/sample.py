"""A sample of text by content: its pieces do not depend on their order."""

import hashlib
import heapq
from collections.abc import Iterator


class TextSample:
    """Keeps all pieces of text if they fit, else those with the lowest hashes.

    The sample consists of as many pieces as fit, in the order of their hashes.

    Args:
        most_bytes: Maximum number of bytes of UTF-8 to keep.
    """

    def __init__(self, most_bytes: int) -> None:
        self.seen_bytes = 0
        """Bytes of all pieces."""
        self.kept_bytes = 0
        """Bytes of the pieces in the sample."""
        self._most_bytes = most_bytes
        self._limit = 1 << 64
        self._kept: list[tuple[int, bytes]] = []  # the highest hash first

    def add(self, text: str) -> None:
        """Offer a piece of text."""
        piece = text.encode()
        self.seen_bytes += len(piece)
        # A hash of its own: the one that deals documents to splits has left none of the lowest here.
        key = int.from_bytes(hashlib.blake2b(piece, digest_size=8, person=b"sample").digest(), "big")
        if key >= self._limit:
            return
        heapq.heappush(self._kept, (-key, piece))
        self.kept_bytes += len(piece)
        while self.kept_bytes > self._most_bytes:
            key, piece = heapq.heappop(self._kept)
            self._limit = -key
            self.kept_bytes -= len(piece)

    def texts(self) -> Iterator[str]:
        """Yield the pieces of the sample."""
        return (piece.decode() for _, piece in self._kept)
