"""Serve the page that draws prompts, for `g2rpo demo`."""

import signal
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from g2rpo_core.cli.options import read_profile
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.runs import BASE
from g2rpo_core.foundation.texts import echo
from g2rpo_core.inference.demo import Demo, make_page
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.runs import find_weights, trained_runs
from g2rpo_core.rewards.addresses import names_of


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
    for other in run or ():
        find_weights(other, profile)
    echo(f"loading the models of {profile} ...")
    painter = Painter(settings, Path("models", profile), device)
    page = make_page(Demo(painter, profile), [BASE[0], *trained_runs(profile), *(run or ())])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # gradio then ends as by Ctrl-C
    # A page of another name that leads here (DNS rebinding) is refused
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=names_of(host))
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            inbrowser=open,
            app_kwargs={"middleware": [guard]},
            max_file_size=1,  # the page takes no files
            theme=gr.themes.Base(font=["system-ui"], font_mono=["ui-monospace"]),  # of no server
            css="img {image-rendering: pixelated}" if settings.evaluation.height < 128 else None,
            footer_links=[],
            share=False,
            ssr_mode=False,
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:
        raise UserError(
            f"demo: port {port} of {host} is not available ({error.strerror or 'it is taken'}): "
            "give another --port"
        ) from None
    echo(f"the demo of {profile} is at {address}; Ctrl-C ends it")
    page.block_thread()
