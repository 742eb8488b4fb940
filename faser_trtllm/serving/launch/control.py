"""The key that protects Triton's control APIs: model loading, shared memory, trace and log settings.

Statistics are open, because load generators read them. So is what clients need to call models. Triton has one rule for
the repository's index and for loading, so the index needs the key.

Triton accepts the key only as a command-line argument, so local users can see it in the process list. It protects from
clients that reach the ports through a proxy, a tunnel or a browser.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from faser_trtllm.errors import ConfigError, reason_of

KEY_VARIABLE = "FASER_CONTROL_KEY"
KEY_FILE_VARIABLE = "FASER_CONTROL_KEY_FILE"
HEADER = "faser-control-key"
GRPC_HEADER = f"triton-grpc-protocol-{HEADER}"  # Triton puts its prefix before the name
RESTRICTED_APIS = ("shared-memory", "model-repository", "trace", "logging")
_KEY = re.compile(r"[A-Za-z0-9._-]{16,256}")


def control_key(environment: Mapping[str, str] = os.environ) -> str:
    """The key in FASER_CONTROL_KEY or in the file FASER_CONTROL_KEY_FILE, else a random one; raises ConfigError."""
    source, key = KEY_VARIABLE, environment.get(KEY_VARIABLE)
    if key is None and KEY_FILE_VARIABLE in environment:
        source, path = KEY_FILE_VARIABLE, Path(environment[KEY_FILE_VARIABLE])
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{KEY_FILE_VARIABLE} is {path}, which cannot be read: {reason}") from None
    if key is None:
        return secrets.token_hex(32)
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{source} gives a key of {len(key)} characters, allowed are 16 to 256 of letters, digits, '.', '_' and "
            "'-'; make one with `openssl rand -hex 32`"
        )
    return key


def restriction(key: str) -> list[str]:
    """Arguments of tritonserver; HTTP and gRPC are restricted separately."""
    rule = f"{','.join(RESTRICTED_APIS)}:{HEADER}={key}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]
