"""Checks that ports are free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from faser_trtllm.errors import InvalidArgumentError, reason_of


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raise InvalidArgumentError for a host that is not an address of this machine, or a port that cannot be used.

    ports: flag name -> port.
    """
    names: dict[int, str] = {}
    for name, port in ports.items():
        if not 1 <= port <= 65535:
            raise InvalidArgumentError(f"{name} is {port}, allowed is 1 to 65535")
        if port in names:
            raise InvalidArgumentError(f"{names[port]} and {name} are both {port}; take another with --{name}")
        names[port] = name
        error = _bind_error(host, port)
        if error is None:
            continue
        if isinstance(error, (socket.gaierror, UnicodeError)) or error.errno == errno.EADDRNOTAVAIL:
            raise InvalidArgumentError(
                f"host is {host:.80}, which is no address of this machine ({reason_of(error)}); name one with --host"
            )
        raise InvalidArgumentError(
            f"{name} {port} on {host} cannot be used, it is taken or not allowed; "
            f"stop what uses it or take another with --{name}"
        )


def is_free(host: str, port: int) -> bool:
    """Return True if this process can listen on the port."""
    return _bind_error(host, port) is None


def _bind_error(host: str, port: int) -> OSError | UnicodeError | None:
    """Return the error of listening on the port, or None."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            return error
    return None
