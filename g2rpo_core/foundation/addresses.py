"""Tells what an address of a server means: who can reach it, and whether it holds a password."""

import ipaddress
import re


def on_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked_url(url: object) -> object:
    """Return `url`; ValueError, which does not repeat it, if it holds a name or password: it is printed and kept in files."""
    if isinstance(url, str) and re.match(r"([^/?#]*//)?[^/?#]*@", url):
        raise ValueError("holds a name or password before @, and addresses are printed and kept in files: use key_variable")
    return url
