"""Define the commands that use rewards alone: `g2rpo score` on a folder of images, and `g2rpo serve-reward` over HTTP."""

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.cli.options import ModelsOfRewards, OfRewards, read_rewards, resolve_alias
from g2rpo_core.foundation.addresses import names_of, on_loopback
from g2rpo_core.foundation.errors import UserError, require
from g2rpo_core.foundation.files import read_text, write_whole, writing
from g2rpo_core.foundation.texts import visible
from g2rpo_core.inference.folder import LISTS, Parts, pair, score_images
from g2rpo_core.inference.runs import tiny_rewards

if TYPE_CHECKING:  # these import torch, which would slow down --help
    import pandas as pd

    from g2rpo_core.rewards.reward_server import Served

STOPS_WITHIN = 30  # seconds that open requests have after a stop signal
KEEPS = 75  # seconds that a quiet connection stays open, longer than clients keep theirs: they would ask on a closed one


def score(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of images")],
    reward: Annotated[
        list[str],
        typer.Option(
            help="hps, clip_score, pickscore, image_reward, unified_reward, hpsv3, ocr, geneval, votes (hps_v2_1 is hps), or one of your "
            "own in the profile's section `rewards`; may be repeated"
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="text file with line n for the n-th image in natural order (2.png before 10.png), or csv, jsonl or Parquet with columns "
            "file,prompt (default: DIR's prompts.csv, metadata.csv or metadata.jsonl, a .txt beside each image, or what the pictures of "
            "`g2rpo generate` say)"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help=".csv or .parquet")] = Path("scores.csv"),
    profile: OfRewards = None,
    models: ModelsOfRewards = None,
) -> None:
    """Score a folder of images with any of the rewards: a table of `file`, `prompt` and a column for each.

    A reward that can fail on an image has a second column, `<name>_reason`: why there is no score.

    Example: g2rpo score --reward hps --prompts prompts.txt pictures
    """
    write_scores(SimpleNamespace(**locals()))


def write_scores(args: SimpleNamespace) -> None:
    """Score the folder and write the table.

    UserError before scoring if an input is missing or damaged, and after it if more scores are missing than `max_missing` allows. What
    was scored before an error is kept beside `--out`: the same command goes on from it.
    """
    from g2rpo_core.common.model_store import LOCK
    from g2rpo_core.common.processes import device_of
    from g2rpo_core.rewards.registry import REWARDS, SPECS, code_of, compares, load, refuse_comparing, settings_of
    from g2rpo_core.rewards.remote import RemoteReward
    from g2rpo_core.rewards.scoring import note_cut

    # Check the options, before any model is loaded
    section, models = read_rewards(args.profile, args.models)
    any_image = [spec.name for spec in SPECS if not spec.tasks_only and not compares(spec.name)]
    any_image += [name for name in section if name not in REWARDS]
    names = [resolve_alias(name) for name in args.reward]
    for given, name in zip(args.reward, names):
        if compares(name):
            raise UserError(refuse_comparing(f"--reward {given}", name, section))
        if name not in any_image:
            aliases = [alias for spec in SPECS for alias in spec.aliases]
            raise UserError(f"--reward {given}: unknown; there are {', '.join([*any_image, *aliases])}")
    if args.out.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {args.out}: must end in .csv or .parquet")
    read = [args.prompts] if args.prompts else [args.folder / name for name in LISTS]
    if args.out.exists() and any(file.exists() and args.out.samefile(file) for file in read):
        raise UserError(f"--out {args.out}: is the file of prompts: give another")
    table = pair(args.folder, args.prompts)
    with writing(args.out):
        args.out.parent.mkdir(parents=True, exist_ok=True)
    # Find what was scored by the same rewards, of the same code
    scorers = load(names, models, device_of(None), section)
    note_cut(scorers, table.prompt)
    lock = models / LOCK
    code = [scorer.health.version if isinstance(scorer, RemoteReward) else code_of(scorer) for scorer in scorers.values()]
    decides = [names, {name: section.get(name) for name in names}, read_text(lock) if lock.exists() else None, code]
    with writing(args.out):
        kept = Parts(args.out, args.folder, table, decides)
    # Score, and note which rewards are small models
    scored = score_images(args.folder, table, scorers, kept)
    for name in scored:
        table[name] = scored[name]
    here = tiny_rewards([name for name in names if not settings_of(section, name).remote], models)
    there = [scorer.health.note for scorer in scorers.values() if isinstance(scorer, RemoteReward)]
    if note := "; ".join(filter(None, [here, *there])):
        table["models"] = note
    with writing(args.out):
        write_whole(args.out, table.to_csv(index=False) if args.out.suffix == ".csv" else table.to_parquet(index=False))
    means = ", ".join(f"{name} {table[name].mean():.4f}" for name in names)
    print(f"{args.out}: {len(table)} images, mean {means}{' (' + visible(note) + ')' if note else ''}")
    _check_missing(table, names, section)
    kept.discard()


def _check_missing(table: "pd.DataFrame", names: list[str], section: Mapping) -> None:
    from g2rpo_core.rewards.registry import max_missing
    from g2rpo_core.rewards.scoring import check_missing

    for name, largest in max_missing(names, section).items():
        missing = table[table[name].isna()]
        reasons = missing.get(f"{name}_reason", missing[name].astype(str))
        check_missing(name, len(missing), len(table), largest, *reasons[:1])


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
    serve(SimpleNamespace(**locals()))


def serve(args: SimpleNamespace) -> None:
    """Check the options, then serve; UserError before the model is loaded if an option does not fit."""
    require("g2rpo serve-reward", "serve", "fastapi", "uvicorn")
    key = read_key(args.key_variable)
    with listen(args.host, args.port) as listener:
        served = load_served(args, key)
        url = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{listener.getsockname()[1]}"
        if not on_loopback(args.host):
            who = "the key travels unencrypted, and anyone with it" if key else "no key is needed: anyone"
            print(f"note: {args.host} can be reached from outside; {who} who reaches it can have images scored", file=sys.stderr)
        health = served.health
        note = f" ({health.note})" if health.note else ""
        print(f"{url} serves {health.reward}: {health.label}{note}, version {health.version}", flush=True)
        answer(served, listener)
    print("stopped")


def answer(served: "Served", listener: socket.socket) -> None:
    """Answer requests until a stop signal; open requests are answered first."""
    import uvicorn

    from g2rpo_core.rewards.reward_server import make_app

    config = uvicorn.Config(
        make_app(served),
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


def load_served(args: SimpleNamespace, key: str | None) -> "Served":
    """Load the reward and describe it; UserError for an unknown one, and for one that the profile only gets from a server."""
    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.common.processes import device_of
    from g2rpo_core.inference.runs import tiny_rewards
    from g2rpo_core.rewards import registry
    from g2rpo_core.rewards.registry import CustomRewardSettings
    from g2rpo_core.rewards.reward_server import Served, describe

    name = resolve_alias(args.reward)
    section, models = read_rewards(args.profile, args.models)
    if name not in registry.labels(section):
        raise UserError(f"--reward {args.reward}: unknown; there are {', '.join(registry.labels(section))}")
    if registry.compares(name):
        raise UserError(registry.refuse_comparing(f"--reward {args.reward}", name, section))
    # clients may use this same profile, with its `server`; here the reward itself is computed
    own = {key: value for key, value in section.get(name, {}).items() if key != "server"}
    if name not in registry.REWARDS and "class" not in own:
        raise UserError(f"--reward {name}: the profile only gets it from a server; set `class` in rewards.{name} to its code")
    device = device_of(args.device)
    settings = registry.settings_of({name: own}, name)
    decides = settings.model_dump(mode="json", exclude={"micro_batch", "max_missing", "server", "label"})
    reward = registry.load([name], models, device, {name: own})[name]
    # Describe it by all that decides its scores
    entries = {model: ModelStore(models).entry(model)["files"] for model in registry.models_of({name: own}, name)}
    health = describe(name, registry.labels(section)[name], decides, entries, tiny_rewards([name], models))
    tensors = isinstance(settings, CustomRewardSettings) or registry.REWARDS[name].tasks_only
    return Served(reward, health, device, tensors, args.max_request_mib * 2**20, key, names_of(args.host))


def read_key(variable: str | None) -> str | None:
    """Read the key that requests must send; None if no variable is named, UserError if it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UserError(f"--key-variable {variable}: is not set in the environment")
    return os.environ[variable]


def listen(host: str, port: int) -> socket.socket:
    """Open a socket on that address, before any model is loaded; UserError if it is taken."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host} --port {port}: cannot listen there: {getattr(error, 'strerror', None) or error}"
        ) from None
