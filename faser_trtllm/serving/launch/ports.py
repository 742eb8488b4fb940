"""Checks that ports are free."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from faser_trtllm.errors import InvalidArgumentError


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raise InvalidArgumentError for the first port that cannot be listened on. ports: by flag name."""
    for name, port in ports.items():
        if not 1 <= port <= 65535:
            raise InvalidArgumentError(f"{name} is {port}, allowed is 1 to 65535")
        if not is_free(host, port):
            raise InvalidArgumentError(
                f"{name} {port} on {host} cannot be used, it is taken or not allowed; "
                f"stop what uses it or take another with --{name}"
            )


def is_free(host: str, port: int) -> bool:
    """Whether this process can listen on the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
