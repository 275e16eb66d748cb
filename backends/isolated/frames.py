"""Messages over a stream socket, one frame each.

"KVTF"  u32 bytes of text  u32 number of buffers  u64 bytes of each buffer  text  buffers

A cancel goes over a pipe of its own and is no frame: `CANCEL`, the number of its session.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Final

from kvtape.backends.isolated.values import WireError, decode, encode

__all__ = ["CANCEL", "receive", "send"]

CANCEL: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<4sII")
_MAGIC: Final = b"KVTF"
# Far above what any session needs: a length beyond them is damage, and must not become an allocation.
_MOST_BUFFERS: Final = 1 << 16
_MOST_BYTES: Final = 1 << 38
_VECTORS: Final = 64
"""Pieces in one system call; every system takes as many."""


def send(sock: socket.socket, message: object) -> None:
    """Send one message. Raises Unsendable before a byte is sent, OSError when the other side is gone or stuck."""
    text, buffers = encode(message)
    sizes = struct.pack(f"<{len(buffers)}Q", *(len(b) for b in buffers))
    head = _HEAD.pack(_MAGIC, len(text), len(buffers)) + sizes + text
    _send_all(sock, [memoryview(head), *(b for b in buffers if len(b))])


def receive(sock: socket.socket) -> Any:
    """The next message. Raises EOFError when the other side has closed, WireError for what is none, OSError."""
    magic, n_text, n_buffers = _HEAD.unpack(_read(sock, _HEAD.size))
    if magic != _MAGIC or n_buffers > _MOST_BUFFERS:
        raise WireError(f"not a message: {magic!r}, {n_buffers} buffers")
    sizes = struct.unpack(f"<{n_buffers}Q", _read(sock, 8 * n_buffers))
    if sum(sizes) > _MOST_BYTES:
        raise WireError(f"a message of {sum(sizes)} bytes")
    text = bytes(_read(sock, n_text))
    return decode(text, [_read(sock, n) for n in sizes])


def _read(sock: socket.socket, n: int) -> bytearray:
    """Exactly `n` bytes, in memory of their own that arrays can live in."""
    into = bytearray(n)
    left = memoryview(into)
    while left:
        got = sock.recv_into(left)
        if got == 0:
            raise EOFError("closed by the other side")
        left = left[got:]
    return into


def _send_all(sock: socket.socket, pieces: list[memoryview]) -> None:
    while pieces:
        sent = sock.sendmsg(pieces[:_VECTORS])
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if sent:
            pieces[0] = pieces[0][sent:]
