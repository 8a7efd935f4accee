"""Define the commands that take a trained run: `g2rpo generate`, `demo` and `export`."""

import math
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from g2rpo_core.cli.options import read_profile
from g2rpo_core.common.runs import BASE
from g2rpo_core.foundation.addresses import on_loopback
from g2rpo_core.foundation.errors import UserError, require
from g2rpo_core.foundation.files import writing
from g2rpo_core.inference.pictures import MOST_STEPS, Pictures
from g2rpo_core.inference.runs import drawn_as, find_weights, trained_runs

if TYPE_CHECKING:  # imports torch, which would slow down --help
    import torch

    from g2rpo_core.data.prompts import Prompt

MOST_SEEDS = 1000


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="prompts; or use --file")] = None,
    file: Annotated[
        Path | None, typer.Option(help="file of prompts, in a format that profiles take: txt, csv, json, jsonl or parquet")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="`base` (the default), a run such as g2rpo-1, or a folder with `transformer` or `lora`; may be repeated"
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="profile whose models and image size are used (default: the one in params.yaml)")
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="seeds of the initial noise: 7, 1,2,5 or 1-4; every prompt and run gets the same noise")
    ] = "0",
    steps: Annotated[int | None, typer.Option(help="denoising steps (default: the first of evaluation.steps)")] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            help="guidance scale (default: that which each run was trained with, and for the base that of the runs beside it)"
        ),
    ] = None,
    trained_share: Annotated[
        float, typer.Option(help="share of the steps, from the noisy end, by the run; the base does the rest")
    ] = 1.0,
    lora_scale: Annotated[float, typer.Option(help="strength of a LoRA run, times its alpha / rank")] = 1.0,
    out: Annotated[Path, typer.Option(help="output folder; it may already hold files")] = Path("pictures"),
    grid: Annotated[
        bool,
        typer.Option("--grid", help="also write one picture of all: a row per prompt, the runs side by side, a column per seed"),
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: a GPU if there is one)")] = None,
) -> None:
    """Draw prompts as PNG files; each file's metadata says how it was made.

    Beside them, prompts.csv says which prompt and seed each is of, for `g2rpo score`. Prompts that are too long for the text encoders
    are refused. No other picture is written over: with other prompts or settings, the numbers in the names go on.

    Example: g2rpo generate "a small red circle" --run base --run g2rpo-1 --seeds 1-4 --grid
    """
    draw(SimpleNamespace(**locals()))


def draw(args: SimpleNamespace) -> None:
    """Check the options, then draw; UserError before any model is loaded if an option does not fit."""
    profile, settings = read_profile(args.profile)
    # Check the options
    seeds, folders = parse_seeds(args.seeds), {run: find_weights(run, profile) for run in args.run or BASE[:1]}
    steps = settings.evaluation.steps[0] if args.steps is None else args.steps
    if not 1 <= steps <= MOST_STEPS or not 0 < args.trained_share <= 1:
        raise UserError(
            f"generate: --steps must be at least 1 and at most {MOST_STEPS}, and --trained-share above 0 and at most 1"
        )
    if not math.isfinite(args.guidance or 0.0) or not math.isfinite(args.lora_scale):
        raise UserError("generate: --guidance and --lora-scale must be finite numbers")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"generate: --out {args.out} is not a folder")
    prompts = read_texts(args)
    sampling = {"steps": steps, "trained_share": args.trained_share, "lora_scale": args.lora_scale}
    runs = drawn_as(folders, profile, settings, args.guidance)
    own = {run: {"guidance": how.guidance} for run, (_, how) in runs.items()}
    pictures = Pictures(args.out, list(runs), prompts, seeds, {"profile": profile, **sampling}, args.grid, own)
    with writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        pictures.find_room()

    from g2rpo_core.inference.painter import Painter

    # Draw every prompt with every seed, by one run after the other
    painter = Painter(settings, Path("models", profile), args.device)
    encoded = painter.encode(prompts)
    drawn: dict[str, list[torch.Tensor]] = {run: [] for run in runs}
    with writing(args.out):
        for run, (weights, how) in runs.items():
            painter.forget()
            folder = folders[weights]
            pictures.origin["shift"] = painter.find_schedule(painter.policy(folder, how)).shift_at(steps)
            for number, conditioning in enumerate(encoded):
                images = painter.draw(folder, conditioning, seeds, sampling=how, **sampling)
                if args.grid:
                    drawn[run].append(images)
                for path in pictures.write(run, number, images):
                    print(path)
        for path in pictures.write_last(drawn):
            print(path)


def parse_seeds(text: str) -> list[int]:
    """Parse `1,4-6` as 1, 4, 5, 6; UserError for anything else, and for more than 1,000."""
    seeds: dict[int, None] = {}
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            span = range(int(first), int(last or first) + 1)
            if len(span[: MOST_SEEDS + 1]) > MOST_SEEDS or int(last or first) >= 2**63:
                raise ValueError
            seeds |= dict.fromkeys(span)
    except ValueError:
        seeds = {}
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise UserError(f"generate: --seeds {text}: give whole numbers from 0, as 7, 1,2,5 or 1-4, at most 1,000")
    return list(seeds)


def read_texts(args: SimpleNamespace) -> "list[Prompt]":
    """Return the prompts from the arguments or the file."""
    from g2rpo_core.data.prompts import given_prompts, read_prompts

    if bool(args.prompts) == bool(args.file):
        raise UserError("generate: give prompts, or a file of them with --file")
    return read_prompts(args.file) if args.file else given_prompts(args.prompts)


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
    """Serve a page that draws prompts with the base and trained runs side by side, with their scores, and that takes votes.

    Example: g2rpo demo --open
    """
    require("g2rpo demo", "demo", "gradio")
    profile, settings = read_profile(profile)
    others = run or []
    for other in others:
        find_weights(other, profile)
    # runs in the order of the methods, so that the first method is ticked; other runs come last
    methods = list(settings.methods)
    place = lambda name: methods.index(method) if (method := name.rpartition("-")[0]) in methods else len(methods)
    list_runs = lambda: [*sorted(trained_runs(profile), key=place), *others]

    from g2rpo_core.inference.demo.page import make_page, serve
    from g2rpo_core.inference.demo.views import OPEN_TO_ALL
    from g2rpo_core.inference.painter import Painter
    from g2rpo_core.rewards.registry import compares

    # Load the models before the page appears
    painter = Painter(settings, Path("models", profile), device)
    print(f"loading the models of {profile} ...", flush=True)
    painter.policy(None)
    painter.encoders  # noqa: B018 - loads them
    painter.load_rewards([name for name in settings.training.rewards if not compares(name)])
    # Serve until Ctrl-C or SIGTERM
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    public = not on_loopback(host)
    serving = serve(make_page(painter, profile, list_runs, public), host, port, open)
    if public:
        print(OPEN_TO_ALL)
    print(f"the demo of {profile} is at {serving}; Ctrl-C ends it", flush=True)
    with suppress(KeyboardInterrupt):
        ended.wait()


def export(
    run: Annotated[
        str, typer.Argument(help="a run such as g2rpo-1, or a path: a run's folder, or a transformer or LoRA of others")
    ],
    form: Annotated[
        Literal["diffusers", "original", "lora", "peft", "kohya"],
        typer.Option(
            help="diffusers: a folder for from_pretrained; original: one file with the first publisher's names, for ComfyUI's "
            "diffusion_models (FLUX.1, FLUX.2, Z-Image); for a LoRA: lora (diffusers and ComfyUI), peft (PeftModel.from_pretrained) or "
            "kohya (programs that read sd-scripts' names)"
        ),
    ],
    out: Annotated[Path, typer.Option(help="a new folder")],
    profile: Annotated[str | None, typer.Option(help="profile of the run (default: the one in params.yaml)")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="float32 as trained, or bfloat16 for half the size")
    ] = "float32",
    push: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="upload the folder to this hub repository (user/name); private if it is new"),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="with --push: make the repository public")] = False,
) -> None:
    """Write a run's trained weights in a form that other programs read, with a model card.

    Example: g2rpo export g2rpo-1 --form original --out my_model
    """
    write_export(SimpleNamespace(**locals()))


def write_export(args: SimpleNamespace) -> None:
    """Check the options, then export; UserError before anything is written if something does not fit."""
    # Check the options
    from g2rpo_core.config import load_profile, load_run, profile_path

    profile = args.profile or load_run().profile
    folder = find_weights(args.run, profile)
    if folder is None:
        raise UserError("export: the base needs no export: it is in models/<profile>/pipeline, or on the hub")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise UserError(f"export: --out {args.out} already exists; name a new folder")
    from g2rpo_core.inference.export import check_form, check_repo, push, write, write_card
    from g2rpo_core.models.stored import weights_in

    trained, lora = weights_in(folder)
    if (args.form in ("lora", "peft", "kohya")) != lora:
        forms = "a LoRA: --form lora, peft or kohya" if lora else "whole weights: --form diffusers or original"
        raise UserError(f"export: {args.run} was trained as {forms}")
    models = Path("models", profile)
    base = check_form(models, args.form)
    if args.public and not args.push:
        raise UserError("export: --public needs --push")
    if args.push:
        check_repo(args.push)

    # Write weights and card aside, then give them their name, and upload them
    out = args.out.resolve()
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with writing(args.out):
            aside.mkdir(parents=True)
            file = write(models, trained, folder.name.removesuffix(".safetensors"), args.form, aside, args.dtype)
            card = write_card(aside, profile, base, folder, args.form, file, args.push)
            # Weights are written as for their owner alone
            for each in filter(Path.is_file, aside.rglob("*")):
                each.chmod(card.stat().st_mode)
            aside.replace(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(args.out / file.relative_to(aside))
    if args.form == "original" and load_profile(profile_path(profile)).models.source != "hub":
        note = "diffusers' from_single_file takes this form for FLUX.1 at its true size, so it cannot read it of a small model"
        print(f"note: {note}", file=sys.stderr)
    if args.push:
        print(push(args.out, args.push, args.public))
