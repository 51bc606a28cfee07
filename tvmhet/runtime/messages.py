"""What the parent and the workers say to each other: fixed-size tokens through pipes, rare pickles through a socket.

A token says "one thing that stage `stage` waits for is there, for input `input_index` in frame `frame`". Tensors never
travel: they lie in the shared frame. Tokens are shorter than PIPE_BUF, so writes by several processes stay whole, and
the pipe orders the tensor's bytes before the token that announces them.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

_TOKEN = struct.Struct("=iiqii")
_LENGTH = struct.Struct("=Q")
PIPE_BYTES = 65536  # Linux's default capacity of a pipe
MAX_TOKENS_IN_PIPE = PIPE_BYTES // _TOKEN.size // 2
STOP_STAGE = -1  # a token for this stage ends a worker's loop
STORE_STAGE = -2  # asks for the states of a slot in shared memory; comes back once they are there
FORGET_STAGE = -3  # says that the states of a session are others now, in shared memory


class Token(NamedTuple):
    """One arrival. `failed` travels on, so that a failed input still leaves the pipeline in order.

    `slot` says where the states lie that the input begins with.
    """

    stage: int
    frame: int
    input_index: int
    failed: bool
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded its stages."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker could not load (`input_index` is None) or run a stage. `text` is the original error.

    `needs_memory` says that its device's memory was used up.
    """

    stage: int | None
    input_index: int | None
    text: str
    needs_memory: bool = False


def write_token(fd: int, token: Token) -> None:
    """Write one token. Blocks only when the pipe is full, which the frame limit rules out."""
    os.write(fd, _TOKEN.pack(token.stage, token.frame, token.input_index, token.failed, token.slot))


def read_tokens(fd: int) -> Iterator[Token]:
    """Wait for at least one token and return those that are there; none at the end of the pipe."""
    data = os.read(fd, _TOKEN.size * 128)
    return (
        Token(stage, frame, index, bool(failed), slot) for stage, frame, index, failed, slot in _TOKEN.iter_unpack(data)
    )


def send_object(control: socket.socket, value: Any) -> None:
    """Send one object to the peer at the other end of a private socket pair."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    control.sendall(_LENGTH.pack(len(data)) + data)


def receive_object(control: socket.socket) -> Any:
    """Return the next object. Raises EOFError when the peer is gone."""
    (length,) = _LENGTH.unpack(_receive_exactly(control, _LENGTH.size))
    return pickle.loads(_receive_exactly(control, length))


def _receive_exactly(control: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = control.recv(count - len(parts))
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError("the peer closed its end")
        parts += part
    return bytes(parts)
