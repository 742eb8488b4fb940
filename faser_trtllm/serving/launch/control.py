"""The key that protects Triton's control APIs: model loading, shared memory, trace and log settings.

The APIs that clients need to call models are open, and so are statistics, because load generators read them. The
repository's index needs the key, because Triton has one rule for the index and for loading.

Triton accepts the key only as a command-line argument, so local users can see it in the process list. It protects
against clients that reach the ports through a proxy, a tunnel or a browser.
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
    """Return the key in FASER_CONTROL_KEY or the file FASER_CONTROL_KEY_FILE, or a random one; raise ConfigError."""
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
            f"{source} has a key of {len(key)} characters, allowed are 16 to 256 letters, digits, '.', '_' and '-'; "
            "generate one with `openssl rand -hex 32`"
        )
    return key


def restriction(key: str) -> list[str]:
    """Return arguments of tritonserver that restrict the APIs, for HTTP and gRPC separately."""
    rule = f"{','.join(RESTRICTED_APIS)}:{HEADER}={key}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]
