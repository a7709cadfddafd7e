"""Authenticated messages between two processes that share a secret: the protocol of a line.

Each side first proves that it knows the secret, by a keyed hash (HMAC, RFC 2104) of two random
numbers, one of which the other has just generated:

    caller   magic, its rank, the callee's rank, the purpose, a random number
    called   a random number, proof
    caller   proof

Messages follow: length, a hash of direction, count and content, JSON. Without the secret
no process can forge or replay a message. Messages are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from typing import Any

LONGEST_MESSAGE_BYTES = 1 << 22
_MAGIC = b"unisono1"
_HELLO = struct.Struct("<8sII?32s")
_HEAD = struct.Struct("<I32s")
_PROOF_BYTES = 32


class Stranger(ValueError):
    """The other side does not know the secret, or speaks another protocol."""


class Session:
    """One side of a line: bytes in, messages and bytes out; no socket.

    `me` and `peer` are global ranks; the called side learns the peer's, -1 at first, from the
    caller. A summons has no messages: it asks the callee to connect back. `is_proved`: the other
    side knows the secret, and messages may be exchanged. `has_left`: it has ended the conversation.
    """

    def __init__(self, secret: bytes, me: int, peer: int = -1, *, is_summons: bool = False) -> None:
        self.peer = peer
        self.is_summons = is_summons
        self.is_proved = False
        self.has_left = False
        self._secret, self._me = secret, me
        self.is_caller = peer >= 0
        self._nonce = secrets.token_bytes(32)
        self._told = b""  # both ranks and both random numbers, once known
        self._unread = bytearray()
        self._counts = {True: 0, False: 0}  # of messages from the caller, and to it

    def first_bytes(self) -> bytes:
        """What this side sends first."""
        if not self.is_caller:
            return b""
        return _HELLO.pack(_MAGIC, self._me, self.peer, self.is_summons, self._nonce)

    def receive(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """The bytes to answer, and the complete messages. Raises Stranger."""
        self._unread += data
        answer = b""
        if not self.is_proved:
            answer = self._shake_hands()
        messages: list[dict[str, Any]] = []
        while self.is_proved and not self.has_left:
            content = self._next_content()
            if content is None:
                break
            if content:
                messages.append(_decode(content))
            else:
                self.has_left = True
        return answer, messages

    def encode(self, message: dict[str, Any]) -> bytes:
        """A message as it is sent. Raises ValueError if it is too long."""
        content = json.dumps(message).encode()
        if len(content) > LONGEST_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(content):,} bytes is too long for a control line")
        return self._frame(content)

    def encode_goodbye(self) -> bytes:
        """What ends the conversation cleanly."""
        return self._frame(b"")

    def _shake_hands(self) -> bytes:
        if self.is_caller:
            given = self._take(len(self._nonce) + _PROOF_BYTES)
            if given is None:
                return b""
            nonce, proof = given[: len(self._nonce)], given[len(self._nonce) :]
            self._told = self.first_bytes() + nonce
            self._check_proof(proof, by_caller=False)
            return self._proof(by_caller=True)
        answer = b""
        if not self._told:
            if not _MAGIC.startswith(self._unread[: len(_MAGIC)]):
                raise Stranger("it speaks another protocol")
            hello = self._take(_HELLO.size)
            if hello is None:
                return b""
            _, peer, called, self.is_summons, _ = _HELLO.unpack(hello)
            if called != self._me:
                raise Stranger("it wants another rank")
            self.peer = int(peer)
            self._told = hello + self._nonce
            answer = self._nonce + self._proof(by_caller=False)
        answered = self._take(_PROOF_BYTES)
        if answered is not None:
            self._check_proof(answered, by_caller=True)
        return answer

    def _proof(self, by_caller: bool) -> bytes:
        return self._hash(b"caller" if by_caller else b"called", self._told)

    def _check_proof(self, proof: bytes, by_caller: bool) -> None:
        if not hmac.compare_digest(proof, self._proof(by_caller)):
            raise Stranger("it does not know the secret of this job")
        self.is_proved = True

    def _frame(self, content: bytes) -> bytes:
        return _HEAD.pack(len(content), self._seal(content, from_caller=self.is_caller)) + content

    def _next_content(self) -> bytes | None:
        if len(self._unread) < _HEAD.size:
            return None
        length, seal = _HEAD.unpack_from(self._unread)
        if length > LONGEST_MESSAGE_BYTES:
            raise Stranger("a message is too long")
        frame = self._take(_HEAD.size + length)
        if frame is None:
            return None
        content = frame[_HEAD.size :]
        if not hmac.compare_digest(seal, self._seal(content, from_caller=not self.is_caller)):
            raise Stranger("a message has a wrong signature")
        return content

    def _seal(self, content: bytes, from_caller: bool) -> bytes:
        count = self._counts[from_caller]
        self._counts[from_caller] += 1
        about = struct.pack("<?Q", from_caller, count)
        return self._hash(b"message", self._told, about, content)

    def _hash(self, *parts: bytes) -> bytes:
        return hmac.digest(self._secret, b"".join(parts), hashlib.sha256)

    def _take(self, count: int) -> bytes | None:
        if len(self._unread) < count:
            return None
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken


def _decode(content: bytes) -> dict[str, Any]:
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Stranger("a message is not JSON") from error
    if not isinstance(message, dict):
        raise Stranger("a message is not a JSON object")
    return message
