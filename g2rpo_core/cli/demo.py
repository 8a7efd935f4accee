"""Serve the page that draws prompts, for `g2rpo demo`."""

import signal
import threading
from contextlib import suppress
from pathlib import Path

from g2rpo_core.cli.options import read_profile
from g2rpo_core.foundation.texts import echo
from g2rpo_core.inference.demo.page import make_page, serve
from g2rpo_core.inference.demo.views import OPEN_TO_ALL
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.runs import find_weights, trained_runs
from g2rpo_core.rewards.addresses import on_loopback
from g2rpo_core.rewards.registry import compares


def demo(
    profile: str | None,
    run: list[str] | None,
    port: int,
    host: str,
    device: str | None,
    open: bool,
) -> None:
    """Load the models, then serve until Ctrl-C or SIGTERM."""
    profile, settings = read_profile(profile)
    others = run or []
    for other in others:
        find_weights(other, profile)
    # runs in the order of the methods, so that the first method is ticked; other runs come last
    methods = list(settings.methods)
    place = lambda name: (
        methods.index(method) if (method := name.rpartition("-")[0]) in methods else len(methods)
    )
    list_runs = lambda: [*sorted(trained_runs(profile), key=place), *others]

    # Load the models before the page appears
    painter = Painter(settings, Path("models", profile), device)
    echo(f"loading the models of {profile} ...")
    painter.policy(None)
    painter.encoders  # noqa: B018 - loads them
    painter.load_rewards([name for name in settings.training.rewards if not compares(name)])
    # Serve until Ctrl-C or SIGTERM
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    public = not on_loopback(host)
    serving = serve(make_page(painter, profile, list_runs, public), host, port, open)
    if public:
        echo(OPEN_TO_ALL)
    echo(f"the demo of {profile} is at {serving}; Ctrl-C ends it")
    with suppress(KeyboardInterrupt):
        ended.wait()
