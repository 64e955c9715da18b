"""What a `TCPStore` and its server say to each other.

A client begins with `HELLO`; all that follows are frames. A frame is its length (4 bytes, little endian), then
fields, each with its length (4 bytes). A request's fields are the command, the key, the values; an answer's are
``ok`` or ``error`` and a value.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

MAX_FRAME = 64 << 20
HELLO = b"\0wholestep store 2\n"


def pack(*fields: bytes) -> bytes:
    """A frame."""
    body = b"".join(struct.pack("<I", len(part)) + part for part in fields)
    return struct.pack("<I", len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """The fields of a frame's body.

    Raises:
        ValueError, struct.error: it is none.
    """
    fields, at = [], 0
    while at < len(body):
        (length,) = struct.unpack_from("<I", body, at)
        if at + 4 + length > len(body):
            raise ValueError("a field runs past its frame")
        fields.append(body[at + 4 : at + 4 + length])
        at += 4 + length
    return fields


def proof(secret: str, side: bytes, nonce: bytes) -> bytes:
    """That a side, ``client`` or ``server``, knows the secret; ``nonce`` is the other side's."""
    return hmac.new(secret.encode(), b"wholestep store 2 " + side + nonce, hashlib.sha256).digest()
