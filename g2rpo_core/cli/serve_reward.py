"""Serve a reward over HTTP, for `g2rpo serve-reward`."""

import os
import signal
import socket
import sys
from pathlib import Path

import torch
import uvicorn

from g2rpo_core.cli.options import read_rewards
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.inference.reward_models import Place, folder_of_rewards
from g2rpo_core.inference.runs import tiny_rewards
from g2rpo_core.numerics.processes import device_of
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.addresses import names_of, on_loopback
from g2rpo_core.rewards.reward_protocol import Health
from g2rpo_core.rewards.reward_server import Served, describe, make_app
from g2rpo_core.rewards.spec import Reward, Section

STOPS_WITHIN = 30  # seconds that open requests have after a stop signal
# Seconds that a quiet connection stays open: longer than at clients, who would ask on a closed one
KEEPS = 75


def serve_reward(
    reward: str,
    profile: str | None,
    models: Path | None,
    published: bool,
    host: str,
    port: int,
    device: str | None,
    max_request_mib: int,
    key_variable: str | None,
) -> None:
    """Check the options, then serve; UserError before the model is loaded."""
    key = os.environ.get(key_variable or "")
    if key_variable and not key:
        raise UserError(f"--key-variable {key_variable}: is not set in the environment")
    with listen(host, port) as listener:
        on = device_of(device)
        made, health = load(reward, read_rewards(profile, models, published), on)
        served = Served(
            made,
            health,
            on,
            most_bytes=max_request_mib * 2**20,
            key=key,
            names=names_of(host),
        )
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        if not on_loopback(host):
            who = (
                "the key travels unencrypted, and anyone with it"
                if key
                else "no key is needed: anyone"
            )
            echo(
                f"note: {host} can be reached from outside; {who} who reaches it can have images "
                "scored",
                file=sys.stderr,
            )
        note = f" ({health.note})" if health.note else ""
        echo(f"{url} serves {health.reward}: {health.label}{note}, version {health.version}")
        answer(served, listener)
    echo("stopped")


def answer(served: Served, listener: socket.socket) -> None:
    """Answer requests until a stop signal; open requests are answered first."""
    config = uvicorn.Config(
        make_app(served),
        http="h11",  # which has a limit on headers; httptools has none
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=STOPS_WITHIN,
        timeout_keep_alive=KEEPS,
    )
    # uvicorn raises them again after it has stopped, which would end in a traceback
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listener])


def load(asked: str, read: tuple[Section, Place], device: torch.device) -> tuple[Reward, Health]:
    """Load and describe a reward; UserError if it is unknown or only a server computes it.

    read: the section `rewards` and where models are, as of `read_rewards`.
    """
    (section, place), name = read, registry.ALIASES.get(asked, asked)
    named = registry.labels(section)
    if name not in named:
        raise UserError(f"--reward {asked}: unknown; there are {', '.join(named)}")
    # clients may use this same profile, with its `server`; here the reward itself is computed
    own = {key: value for key, value in section.get(name, {}).items() if key != "server"}
    if name not in registry.REWARDS and "class" not in own:
        raise UserError(
            f"--reward {name}: the profile only gets it from a server; "
            f"set `class` in rewards.{name} to its code"
        )
    folder = folder_of_rewards([name], {name: own}, place)
    reward = registry.load([name], folder, device, {name: own})[name]
    # Describe it by all that decides its scores
    decides = registry.settings_of({name: own}, name).model_dump(
        mode="json", exclude={"micro_batch", "max_missing", "server", "label"}
    )
    entries = {
        model: ModelStore(folder).entry(model)["files"]
        for model in registry.models_of({name: own}, name)
    }
    return reward, describe(name, named[name], decides, entries, tiny_rewards([name], folder))


def listen(host: str, port: int) -> socket.socket:
    """Open a socket on that address, before any model is loaded; UserError if it is taken."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host} --port {port}: cannot listen there: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from None
