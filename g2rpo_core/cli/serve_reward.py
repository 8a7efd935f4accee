"""Serve a reward over HTTP, for `g2rpo serve-reward`."""

import os
import signal
import socket
import sys
from pathlib import Path

import torch
import uvicorn

from g2rpo_core.cli.options import read_rewards, resolve_alias
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.inference.reward_models import Place, folder_of_rewards
from g2rpo_core.inference.runs import tiny_rewards
from g2rpo_core.numerics.processes import device_of
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.addresses import names_of, on_loopback
from g2rpo_core.rewards.registry import CustomRewardSettings
from g2rpo_core.rewards.reward_server import Served, describe, make_app
from g2rpo_core.rewards.spec import Section

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
    key = read_key(key_variable)
    with listen(host, port) as listener:
        served = load_served(
            reward,
            read_rewards(profile, models, published),
            device_of(device),
            key,
            names_of(host),
            max_request_mib,
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
        health = served.health
        note = f" ({health.note})" if health.note else ""
        echo(
            f"{url} serves {health.reward}: {health.label}{note}, version {health.version}",
        )
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


def load_served(
    asked: str,
    read: tuple[Section, Place],
    device: torch.device,
    key: str | None,
    hosts: list[str],
    mib: int,
) -> Served:
    """Load and describe a reward; UserError if it is unknown or only a server computes it.

    read: the section `rewards` and where models are, as of `read_rewards`.
    """
    name, (section, place) = resolve_alias(asked), read
    if name not in registry.labels(section):
        raise UserError(
            f"--reward {asked}: unknown; there are {', '.join(registry.labels(section))}"
        )
    # clients may use this same profile, with its `server`; here the reward itself is computed
    own = {key: value for key, value in section.get(name, {}).items() if key != "server"}
    if name not in registry.REWARDS and "class" not in own:
        raise UserError(
            f"--reward {name}: the profile only gets it from a server; "
            f"set `class` in rewards.{name} to its code"
        )
    settings = registry.settings_of({name: own}, name)
    decides = settings.model_dump(
        mode="json", exclude={"micro_batch", "max_missing", "server", "label"}
    )
    folder = folder_of_rewards([name], {name: own}, place)
    reward = registry.load([name], folder, device, {name: own})[name]
    # Describe it by all that decides its scores
    entries = {
        model: ModelStore(folder).entry(model)["files"]
        for model in registry.models_of({name: own}, name)
    }
    health = describe(
        name, registry.labels(section)[name], decides, entries, tiny_rewards([name], folder)
    )
    tensors = isinstance(settings, CustomRewardSettings) or registry.REWARDS[name].tasks_only
    spec = registry.REWARDS.get(name)
    own_limits = {"problem_of_image": spec.problem_of_image} if spec else {}
    return Served(reward, health, device, tensors, mib * 2**20, key, hosts, **own_limits)


def read_key(variable: str | None) -> str | None:
    """Read the key that requests must send; None without a variable, UserError if it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UserError(f"--key-variable {variable}: is not set in the environment")
    return os.environ[variable]


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
