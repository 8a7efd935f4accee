"""What a server's address says: who can reach it, by which names, and whether it has a login."""

import ipaddress
import re
from contextlib import suppress

import httpx


def on_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked_url(url: object) -> object:
    """Return `url`; ValueError if it is no address, or holds a name or password.

    The error does not repeat the address, because errors are printed.
    """
    if re.match(r"([^/?#]*//)?[^/?#]*@", str(url)):
        raise ValueError(
            "holds a name or password before @, and addresses are printed and kept in files: "
            "use key_variable"
        )
    try:
        address = httpx.URL(str(url))
        host = address.host  # which decodes it
    except (httpx.InvalidURL, ValueError):
        host = ""
    if not host or not 0 < (address.port or 80) < 2**16:
        raise ValueError("is no address: it has no host, or a port that there is not")
    return url


def names_of(host: str) -> list[str]:
    """Return the host names under which a server that listens on `host` may be asked.

    `*`, any name, if it listens on all addresses. A page whose own name leads here (DNS rebinding)
    is then refused.
    """
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return ["*"]
    return ["localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host]
