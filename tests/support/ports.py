"""
Ports that follow on each other, for processes that are told only the first.
"""

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
"""The system gives none of these to outgoing connections, so that the second is not taken meanwhile."""


def neighbouring_ports(count: int = 2) -> int:
    """The first of so many ports in a row that nobody listens on at the moment."""
    while True:
        first = random.choice(_BELOW_EPHEMERAL)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
