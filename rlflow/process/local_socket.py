"""A socket on one network interface, for a store of torch, which would listen on all of them."""

from __future__ import annotations

import contextlib
import socket


def listening(address: str, port: int) -> socket.socket | None:
    """A socket on the interface of `address`; None where that is not an address of this machine, such as a service's.

    Args:
        address: A host's name or number.
        port: Port to listen on; 0 for a free one.
    """
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place, family=family, backlog=2048)
    return None
