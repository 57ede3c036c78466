"""A socket that is reached on one interface alone, for a store of torch, which would listen on all."""

from __future__ import annotations

import contextlib
import socket


def listening(address: str, port: int) -> socket.socket | None:
    """A socket on the interface of `address`; None where that is no address of this machine, such as a service's.

    Args:
        address: A host's name or number.
        port: To listen on; 0 for a free one.
    """
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        served = socket.socket(family, kind, protocol)
        served.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            served.bind(place)
            served.listen(2048)
        except OSError:
            served.close()
            raise
        return served
    return None
