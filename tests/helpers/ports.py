"""Ports for servers that a test starts in another process."""

import random
import socket
from contextlib import ExitStack


def free_ports(number: int) -> list[int]:
    """Return consecutive ports of loopback that are free.

    They lie below those that systems give to outgoing connections: such a connection of another test, open or just
    closed, could else hold the port by the time that the server wants it.
    """
    while True:
        first = random.SystemRandom().randrange(15000, 30000)
        ports = list(range(first, first + number))
        with ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return ports
