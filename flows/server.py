"""Find the Prefect server that PREFECT_API_URL names, and say who else could use it."""

import socket
import sys
import urllib.parse

import httpx
import psutil
from prefect.settings import PREFECT_API_URL

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.rewards.addresses import on_loopback

KEY = (
    "PREFECT_SERVER_API_AUTH_STRING=name:password where it starts, "
    "and the same as PREFECT_API_AUTH_STRING here"
)


def answers(api: str) -> bool:
    """Tell whether a server answers at `api` (http://host:port/api) within five seconds."""
    try:
        return httpx.get(f"{api}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def find_server() -> str:
    """Return the address of the server's API.

    Whoever may use a server can make it run commands as this user. UserError if there is none, or
    if it asks for no key and other machines can reach it; a warning if users of this machine can.
    """
    api = PREFECT_API_URL.value()
    if not api:
        raise UserError(
            "flows.serve needs a Prefect server: start one by `prefect server start`, "
            "and export PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    if not answers(api):
        raise UserError(f"{api}: no Prefect server answers: start it, or correct PREFECT_API_URL")
    if httpx.get(f"{api}/admin/version", timeout=5).status_code == httpx.codes.UNAUTHORIZED:
        return api
    if _is_open_to_others(api):
        raise UserError(
            f"{api}: this server asks for no key, and other machines can reach it: whoever does "
            f"can run commands as you. Set {KEY}"
        )
    echo(f"warning: {api} asks for no key: set {KEY}", file=sys.stderr)
    return api


def _is_open_to_others(api: str) -> bool:
    """Tell whether a server is elsewhere, or listens here for more than this machine."""
    parts = urllib.parse.urlsplit(api)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = {each[4][0] for each in socket.getaddrinfo(parts.hostname, port)}
    try:
        found |= {
            each.laddr.ip
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port
        }
    except psutil.AccessDenied:  # not told to everybody on macOS
        return True
    return not all(map(on_loopback, found))
