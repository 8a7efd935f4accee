"""What a server's address says: who can reach it, by which names, and whether it has a login."""

import ipaddress
import re
from contextlib import suppress


def on_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked_url(url: object) -> object:
    """Return `url`; ValueError if it holds a name or password, because addresses are printed.

    The error does not repeat the address.
    """
    if isinstance(url, str) and re.match(r"([^/?#]*//)?[^/?#]*@", url):
        raise ValueError(
            "holds a name or password before @, and addresses are printed and kept in files: "
            "use key_variable"
        )
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
