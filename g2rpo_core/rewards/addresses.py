"""Tells what an address of a server means: who can reach it, by which names, and whether it holds a password."""

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
    """Return `url`; ValueError, which does not repeat it, if it holds a name or password: it is printed and kept in files."""
    if isinstance(url, str) and re.match(r"([^/?#]*//)?[^/?#]*@", url):
        raise ValueError(
            "holds a name or password before @, and addresses are printed and kept in files: "
            "use key_variable"
        )
    return url


def names_of(host: str) -> list[str]:
    """Return the names by which browsers and clients may ask a server that listens on `host`; any (`*`) if that is all addresses.

    A page of another name that leads here (DNS rebinding) is then refused.
    """
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return ["*"]
    return ["localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host]
