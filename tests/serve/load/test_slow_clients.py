"""Clients that send a byte now and then: they are shown the door, and nobody else waits for them."""

from __future__ import annotations

import socket
import time
from typing import Any

REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
MANY = 60


def connect(service: Any) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", service.port), timeout=120)
    made.settimeout(120)
    return made


def trickle(connections: list[socket.socket], data: bytes, seconds: float) -> float:
    """A byte on every connection ten times a second; how long until the last one was closed by the other side."""
    began = time.monotonic()
    open_ones = {one: 0 for one in connections}
    while open_ones and time.monotonic() - began < seconds:
        for one in list(open_ones):
            try:
                one.send(data[open_ones[one] % len(data)].to_bytes(1, "big"))
                open_ones[one] += 1
                one.setblocking(False)
                try:
                    if not one.recv(4096):
                        del open_ones[one]
                except BlockingIOError:
                    pass
                finally:
                    if one in open_ones:
                        one.setblocking(True)
            except OSError:
                open_ones.pop(one, None)
        time.sleep(0.1)
    assert not open_ones, f"{len(open_ones)} slow connections are still open"
    return time.monotonic() - began


def test_slow_headers_are_ended_and_others_are_answered_meanwhile(service: Any) -> None:
    connections = [connect(service) for _ in range(MANY)]
    try:
        for one in connections:
            one.sendall(REQUEST + b"X-Slow: ")
        began = time.monotonic()
        assert service.ask(body={"input": "quick"})[0] == 200
        assert time.monotonic() - began < 60
        # Every byte comes in time; the header as a whole does not.
        assert trickle(connections, b"a", 60) < 60
    finally:
        for one in connections:
            one.close()


def test_slow_bodies_are_ended(service: Any) -> None:
    connections = [connect(service) for _ in range(MANY)]
    try:
        for one in connections:
            one.sendall(REQUEST + b"Content-Length: 1000\r\n\r\n{")
        assert service.ask(body={"input": "quick"})[0] == 200
        assert trickle(connections, b" ", 60) < 60
    finally:
        for one in connections:
            one.close()


def test_connections_that_say_nothing_do_not_keep_others_out(service: Any) -> None:
    connections = [connect(service) for _ in range(200)]
    try:
        assert service.ask(body={"input": "quick"})[0] == 200
    finally:
        for one in connections:
            one.close()


def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_trouble(service: Any) -> None:
    for _ in range(20):
        one = connect(service)
        one.sendall(REQUEST + b"Content-Length: 1000\r\n\r\n{")
        one.close()
    assert service.ask(body={"input": "quick"})[0] == 200
