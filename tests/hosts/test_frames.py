"""Messages on a line: a process without the secret can neither send nor replay them."""

from __future__ import annotations

import pytest

from unisono.comm.hosts.frames import LONGEST_MESSAGE_BYTES, Session, Stranger

SECRET = b"s" * 32


def connected(secret: bytes = SECRET) -> tuple[Session, Session]:
    """Host 3, which connects, and host 1."""
    caller, called = Session(SECRET, 3, 1), Session(secret, 1)
    answer, _ = called.receive(caller.first_bytes())
    proof, _ = caller.receive(answer)
    called.receive(proof)
    return caller, called


def test_both_sides_prove_themselves() -> None:
    caller, called = connected()
    assert caller.is_proved
    assert called.is_proved
    assert called.peer == 3


def test_messages_arrive_in_order_however_they_are_cut() -> None:
    caller, called = connected()
    sent = [{"number": number, "text": "ä" * number} for number in range(50)]
    data = b"".join(map(caller.encode, sent)) + caller.encode_goodbye()
    received = []
    for at in range(0, len(data), 7):
        received += called.receive(data[at : at + 7])[1]
    assert received == sent
    assert called.has_left
    assert caller.receive(called.encode({"back": 1}))[1] == [{"back": 1}]


def test_a_handshake_in_single_bytes() -> None:
    caller, called = Session(SECRET, 0, 1), Session(SECRET, 1)
    pending = {True: caller.first_bytes(), False: b""}
    while any(pending.values()):
        for from_caller, other in ((True, called), (False, caller)):
            data, pending[from_caller] = pending[from_caller], b""
            for byte in data:
                pending[not from_caller] += other.receive(bytes([byte]))[0]
    assert caller.is_proved
    assert called.is_proved


def test_another_secret_is_no_proof() -> None:
    with pytest.raises(Stranger, match="does not know the secret"):
        connected(b"t" * 32)


def test_the_called_side_wants_a_proof_too() -> None:
    called = Session(SECRET, 1)
    called.receive(Session(b"t" * 32, 3, 1).first_bytes())
    with pytest.raises(Stranger, match="does not know the secret"):
        called.receive(b"p" * 32)


def test_a_proof_cannot_be_sent_back() -> None:
    """The called side's own proof is not valid for the caller."""
    called = Session(SECRET, 1)
    answer, _ = called.receive(Session(SECRET, 3, 1).first_bytes())
    with pytest.raises(Stranger):
        called.receive(answer[32:])


def test_a_call_for_another_host_and_noise() -> None:
    with pytest.raises(Stranger):
        Session(SECRET, 2).receive(Session(SECRET, 3, 1).first_bytes())
    with pytest.raises(Stranger):
        Session(SECRET, 2).receive(b"GET / HTTP/1.1\r\nHost: host1\r\nAccept: */*\r\n\r\n")


def test_messages_cannot_be_repeated_changed_or_reflected() -> None:
    for harm in (
        lambda data: data + data,
        lambda data: data[:-2] + b"1}",
        lambda data: b"\xff\xff\xff\xff" + data[4:],
    ):
        caller, called = connected()
        with pytest.raises(Stranger):
            called.receive(harm(caller.encode({"a": 0})))
    caller, called = connected()
    with pytest.raises(Stranger):
        caller.receive(caller.encode({"a": 0}))


def test_messages_of_another_conversation_mean_nothing() -> None:
    first, _ = connected()
    _, second = connected()
    with pytest.raises(Stranger):
        second.receive(first.encode({"a": 0}))


def test_a_message_that_is_too_long_is_the_callers_error() -> None:
    caller, called = connected()
    with pytest.raises(ValueError, match="too long"):
        caller.encode({"text": "x" * LONGEST_MESSAGE_BYTES})
    assert called.receive(caller.encode({"a": 0}))[1] == [{"a": 0}]
