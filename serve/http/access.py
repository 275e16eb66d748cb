"""Who may talk to the server, and where it listens."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtape.backends.errors import EnvironmentProblem, UsageError

__all__ = ["KEY_VARIABLE", "Access"]

KEY_VARIABLE = "KVTAPE_API_KEY"
_SHORTEST_KEY = 8
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Access:
    """`digests`: SHA-256 of each key; none: everybody on this machine may ask."""

    host: str
    port: int
    digests: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, host: str, port: int, key_file: Path | None) -> Access:
        """Keys from the file, one a line, or from KVTAPE_API_KEY.

        Raises UsageError for a file that others can read, a key that is too short, and a host that is not of this
        machine alone where there is no key.
        """
        keys = _keys_of(key_file) if key_file is not None else [os.environ.get(KEY_VARIABLE, "")]
        keys = [key for key in keys if key]
        for key in keys:
            if len(key) < _SHORTEST_KEY:
                raise UsageError(f"an API key is shorter than {_SHORTEST_KEY} characters; make a longer one")
        if not keys and not _is_loopback(host):
            raise UsageError(
                f"--host {host}: whoever reaches it could use this server; give --api-key-file or {KEY_VARIABLE}"
            )
        return cls(host, port, tuple(_digest(key) for key in keys))

    def allows(self, authorizations: Sequence[bytes]) -> bool:
        """Whether the one Authorization header bears a key; takes the same time whatever it holds. Of two headers a
        proxy may have looked at the other one."""
        if not self.digests:
            return True
        scheme, _, key = (authorizations[0] if len(authorizations) == 1 else b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = False
        for digest in self.digests:
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == b"bearer"

    def is_host(self, header: str) -> bool:
        """Whether a Host header names this server. With a key it does not matter: no page in a browser has it."""
        if self.digests:
            return True
        name = header.rsplit(":", 1)[0] if not header.endswith("]") else header
        return name.strip("[]").lower() in {"localhost", "127.0.0.1", "::1", self.host.strip("[]").lower()}

    def listen(self) -> socket.socket:
        """A socket that listens. Raises EnvironmentProblem."""
        try:
            host = self.host.strip("[]")
            family, _, _, _, address = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
            except OSError:
                listener.close()
                raise
        except OSError as err:
            raise EnvironmentProblem(
                f"cannot listen on {self.host}, port {self.port}: {err.strerror or err}; choose another --port"
            ) from None
        return listener


def _keys_of(file: Path) -> list[str]:
    try:
        mode = file.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise UsageError(f"{file}: others can read these keys; chmod 600 it")
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"{file}: cannot be read ({err}); give a text file with a key a line") from None
    if not keys:
        raise UsageError(f"{file}: holds no key; give a text file with a key a line")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
