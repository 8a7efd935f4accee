"""`g2rpo demo`: a page to try the base and the trained runs, on this machine alone unless --host is given."""

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from g2rpo_core.inference.runs import folder_of, trained_runs


def demo(
    profile: Annotated[
        str | None, typer.Option(help="profile whose models, runs and image size are used (default: the one in params.yaml)")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(help="folder with `transformer` or `lora`, in addition to the profile's runs; may be repeated"),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="of the page")] = 7860,
    host: Annotated[
        str, typer.Option(help="address of this machine to listen on, so that others can reach it; there is no password")
    ] = "127.0.0.1",
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: a GPU if there is one)")] = None,
    open: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
) -> None:
    """Serve a page that draws prompts with the base and trained runs side by side, with their scores.

    Example: g2rpo demo --open
    """
    from g2rpo_core.config import load_profile, load_run, profile_path

    profile = profile or load_run().profile
    settings = load_profile(profile_path(profile))
    others = run or []
    for one in others:
        folder_of(one, profile)
    methods = list(settings.methods)  # runs follow this order, so that the first method is ticked; other runs come last
    place = lambda name: methods.index(method) if (method := name.rpartition("-")[0]) in methods else len(methods)
    runs_of = lambda: [*sorted(trained_runs(profile), key=place), *others]

    from g2rpo_core.demo.page import make_page, serve
    from g2rpo_core.demo.views import OPEN_TO_ALL
    from g2rpo_core.inference.pictures import Painter

    painter = Painter(settings, Path("models", profile), device)
    print(f"loading the models of {profile} ...", flush=True)
    painter.policy(None)
    painter.encoders  # noqa: B018 - loads them
    painter.load_rewards(list(settings.training.rewards))
    public = not loopback(host)
    serving = serve(make_page(painter, profile, runs_of, public), host, port, open)
    if public:
        print(OPEN_TO_ALL)
    print(f"the demo of {profile} is at {serving}; Ctrl-C ends it", flush=True)
    _wait()


def loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _wait() -> None:
    import threading

    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
