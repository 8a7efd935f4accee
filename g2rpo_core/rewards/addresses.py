"""What a server's address says: who can reach it, by which names, and whether it has a login."""

import ipaddress

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
    try:
        address = httpx.URL(str(url))
        reached = address.host and 0 < (address.port or 80) < 2**16
    except (httpx.InvalidURL, ValueError):
        raise ValueError("is no address") from None
    if not reached or address.userinfo:
        raise ValueError(
            "has no host, a port that there is not, or a name or password before @: addresses are "
            "printed and kept in files, so use key_variable"
        )
    return url


def names_of(host: str) -> list[str]:
    """Return the host names under which a server that listens on `host` may be asked.

    `*`, any name, if it listens on all addresses. A page whose own name leads here (DNS rebinding)
    is then refused.
    """
    if host in ("0.0.0.0", "::"):
        return ["*"]
    return ["localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host]
