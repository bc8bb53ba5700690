"""Who may: tokens for reading and for changing, and nothing from other people's web pages."""

import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxreplay.errors import InputError

READ, WRITE = "read", "write"
VARIABLES = {READ: "PROXREPLAY_READ_TOKEN", WRITE: "PROXREPLAY_WRITE_TOKEN"}
SHORTEST = 16  # characters of a token


@dataclass(frozen=True)
class Access:
    """Tokens, and the name under which a server may be spoken to."""

    read: str | None = None  # token for reading; None for none
    write: str | None = None  # token for changing, which may read too; None for none
    host: str = "127.0.0.1"  # the address that the server listens on

    def __post_init__(self) -> None:
        for kind, token in ((READ, self.read), (WRITE, self.write)):
            if token is not None and len(token) < SHORTEST:
                raise InputError(
                    f"the {kind} token has {len(token)} characters; give {SHORTEST} or more."
                )
            if token and (token != token.strip() or not all(" " <= c <= "~" for c in token)):
                raise InputError(
                    f"the {kind} token cannot be sent in a header; give ASCII characters without "
                    "spaces around them."
                )
        if self.read is not None and self.write is None:
            raise InputError("a token for reading, but none for changing; give both.")
        if self.read is not None and self.read == self.write:
            raise InputError("the tokens for reading and for changing are the same; give two.")
        if not is_loopback(self.host) and (self.read is None or self.write is None):
            raise InputError(
                f"--host {self.host} can be reached from other machines: give tokens for reading "
                f"and for changing, in files (--read-token, --write-token) or in {VARIABLES[READ]} "
                f"and {VARIABLES[WRITE]}."
            )

    def refusal(self, need: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Status and reason why a request may not do what it asks for; None if it may.

        Args:
            need: `READ` or `WRITE`.
            headers: of the request, lower-case.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, f"requests from pages of {origin!r:.80} are refused"
        wanted = (self.read, self.write) if need == READ else (self.write,)
        if wanted[0] is None:
            if not is_loopback(_name(host)) and _name(host) != self.host:
                return 403, f"the host {host!r:.80} is not this machine; use localhost"
            return None
        sent = headers.get("authorization", "")
        given = (sent[7:] if sent[:7].lower() == "bearer " else sent).encode()
        fits = [hmac.compare_digest(given, t.encode()) for t in wanted if t is not None]
        if any(fits):
            return None
        return 401, f"give the token for {'reading' if need == READ else 'changing'}"


def token_from(kind: str, file: Path | None) -> str | None:
    """A token from a file, or from the environment; None if there is neither."""
    if file is None:
        return os.environ.get(VARIABLES[kind]) or None
    token = file.read_bytes().decode("utf-8", "replace").strip()  # what is not ASCII is refused
    if not token:
        raise InputError(f"{file}: holds no token.")
    return token


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("localhost")
    (True, False, True)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _name(host: str) -> str:
    """The host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
