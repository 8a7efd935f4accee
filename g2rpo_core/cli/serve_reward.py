"""`g2rpo serve-reward`: serves any reward over HTTP, for training and evaluation elsewhere."""

import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.cli.options import ModelsOfRewards, OfRewards
from g2rpo_core.errors import UserError

if TYPE_CHECKING:
    from g2rpo_core.serving.reward_server import Served

STOPS_WITHIN = 30  # seconds that open requests have after a stop signal


def serve_reward(
    reward: Annotated[str, typer.Option(help="a built-in reward (hps_v2_1 is hps), or one from the profile's section `rewards`")],
    profile: OfRewards = None,
    models: ModelsOfRewards = None,
    host: Annotated[str, typer.Option(help="address of this machine to listen on; 0.0.0.0 means all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port; the first line of output names it")] = 8700,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu (default: a GPU if there is one)")] = None,
    max_request_mib: Annotated[int, typer.Option(min=1, help="larger requests are refused")] = 512,
    key_variable: Annotated[str | None, typer.Option(help="environment variable with a key that requests must then send")] = None,
) -> None:
    """Serve a reward over HTTP until Ctrl-C or SIGTERM. The protocol is in docs/reward_servers.md.

    Example: g2rpo serve-reward --reward hps --profile tiny --port 8700
    """
    run(SimpleNamespace(**locals()))


def run(args: SimpleNamespace) -> None:
    """Checks the options, then serves; UserError before the model is loaded if an option does not fit."""
    key = key_of(args.key_variable)
    with listening(args.host, args.port) as listener:
        served = served_of(args, key)
        url = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{listener.getsockname()[1]}"
        if not on_loopback(args.host):
            who = "anyone with the key" if key else "no key is needed: anyone"
            print(f"note: {args.host} can be reached from outside; {who} who reaches it can have images scored", file=sys.stderr)
        health = served.health
        note = f" ({health.note})" if health.note else ""
        print(f"{url} serves {health.reward}: {health.label}{note}, version {health.version}", flush=True)
        serve(served, listener)
    print("stopped")


def serve(served: "Served", listener: socket.socket) -> None:
    """Answers requests until a stop signal; open requests are answered first."""
    import uvicorn

    from g2rpo_core.serving.reward_server import make_app

    config = uvicorn.Config(
        make_app(served), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=STOPS_WITHIN
    )
    for stop in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again after it has stopped, which would end in a traceback
        signal.signal(stop, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listener])


def served_of(args: SimpleNamespace, key: str | None) -> "Served":
    from g2rpo_core.common.devices import device_of
    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.inference.runs import tiny_rewards
    from g2rpo_core.rewards import registry
    from g2rpo_core.rewards.custom import CustomRewardSettings
    from g2rpo_core.serving.reward_server import Served, describe

    aliases = {alias: spec.name for spec in registry.SPECS for alias in spec.aliases}
    name = aliases.get(args.reward, args.reward)
    from g2rpo_core.config import load_profile, load_run, profile_path

    profile, section = args.profile, {}
    if profile or args.models is None:
        profile = profile or load_run().profile
        section = load_profile(profile_path(profile)).rewards
    if name not in registry.labels(section):
        raise UserError(f"--reward {args.reward}: unknown; there are {', '.join(registry.labels(section))}")
    # clients may use this same profile, with its `server`; here the reward itself is computed
    own = {key: value for key, value in section.get(name, {}).items() if key != "server"}
    if name not in registry.REWARDS and "class" not in own:
        raise UserError(f"--reward {name}: the profile only gets it from a server; set `class` in rewards.{name} to its code")
    device = device_of(args.device)
    sys.path.insert(0, os.getcwd())  # so that a user's own class is found
    models = args.models or Path("models", str(profile))
    settings = registry.settings_of({name: own}, name)
    decides = settings.model_dump(mode="json", exclude={"micro_batch", "max_missing", "server", "label"})
    reward = registry.load([name], models, device, {name: own})[name]
    entries = {model: ModelStore(models).entry(model)["files"] for model in registry.models_of({name: own}, name)}
    health = describe(name, registry.labels(section)[name], decides, entries, tiny_rewards([name], models))
    tensors = isinstance(settings, CustomRewardSettings) or registry.REWARDS[name].worlds_only
    return Served(reward, health, device, tensors, args.max_request_mib * 2**20, key)


def key_of(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UserError(f"--key-variable {variable}: is not set in the environment")
    return os.environ[variable]


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on that address, opened before any model is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host} --port {port}: cannot listen there: {getattr(error, 'strerror', None) or error}"
        ) from None


def on_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
