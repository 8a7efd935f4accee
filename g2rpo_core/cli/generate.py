"""`g2rpo generate`: pictures of any prompt with the base, a trained run, or both in turn."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.common.runs import BASE
from g2rpo_core.errors import UserError
from g2rpo_core.inference.runs import folder_of

if TYPE_CHECKING:
    from g2rpo_core.data.prompts import Prompt


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="prompts; or use --file")] = None,
    file: Annotated[
        Path | None, typer.Option(help="file of prompts, in a format that profiles take: txt, csv, json, jsonl or parquet")
    ] = None,
    run: Annotated[str, typer.Option(help="`base`, a run such as g2rpo-1, or a folder with `transformer` or `lora`")] = BASE[0],
    profile: Annotated[
        str | None, typer.Option(help="profile whose models and image size are used (default: the one in params.yaml)")
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="seeds of the initial noise: 7, 1,2,5 or 1-4; every prompt and run gets the same noise")
    ] = "0",
    steps: Annotated[int | None, typer.Option(help="denoising steps (default: the first of evaluation.steps)")] = None,
    guidance: Annotated[float | None, typer.Option(help="guidance scale (default: sampling.guidance)")] = None,
    trained_share: Annotated[
        float, typer.Option(help="share of the steps, from the noisy end, by the run; the base does the rest")
    ] = 1.0,
    lora_scale: Annotated[float, typer.Option(help="strength of a LoRA run, times its alpha / rank")] = 1.0,
    out: Annotated[Path, typer.Option(help="output folder; it may already hold files")] = Path("pictures"),
    grid: Annotated[
        bool, typer.Option("--grid", help="also write one picture with a row per prompt and a column per seed")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: a GPU if there is one)")] = None,
) -> None:
    """Draw prompts as PNG files; each file's metadata says how it was made.

    Prompts that are too long for the text encoders are refused.

    Example: g2rpo generate "a small red circle" --run g2rpo-1 --seeds 1-4 --grid
    """
    draw(SimpleNamespace(**locals()))


def draw(args: SimpleNamespace) -> None:
    """Checks the options, then draws; UserError before any model is loaded if an option does not fit."""
    from g2rpo_core.config import load_profile, load_run, profile_path

    profile = args.profile or load_run().profile
    settings = load_profile(profile_path(profile))
    seeds, folder = seeds_of(args.seeds), folder_of(args.run, profile)
    steps = settings.evaluation.steps[0] if args.steps is None else args.steps
    guidance = settings.sampling.guidance if args.guidance is None else args.guidance
    if steps < 1 or not 0 < args.trained_share <= 1:
        raise UserError("generate: --steps must be at least 1, and --trained-share above 0 and at most 1")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"generate: --out {args.out} is not a folder")
    prompts = texts_of(args)

    import torch
    from torchvision.utils import save_image

    from g2rpo_core.inference.pictures import Painter, png

    painter = Painter(settings, Path("models", profile), args.device)
    encoded = painter.encode(prompts)
    args.out.mkdir(parents=True, exist_ok=True)
    how = {"steps": steps, "guidance": guidance, "trained_share": args.trained_share, "lora_scale": args.lora_scale}
    about = {"profile": profile, "run": args.run, "shift": painter.schedule_of(painter.policy(folder)).shift, **how}
    name, rows = args.run.replace("/", "_"), []
    for number, (prompt, conditioning) in enumerate(zip(prompts, encoded)):
        images = painter.draw(folder, conditioning, seeds, **how)
        rows.append(images)
        for seed, image in zip(seeds, images):
            path = args.out / f"{name}-{number:04d}-{seed}.png"
            path.write_bytes(png(image, {**about, "prompt": prompt.text, "seed": seed}))
            print(path)
    if args.grid:
        path = args.out / f"{name}-grid.png"
        save_image(torch.cat(rows), path, nrow=len(seeds))
        print(path)


def seeds_of(words: str) -> list[int]:
    """`1,4-6` -> 1, 4, 5, 6; UserError for anything else, and for more than 1,000."""
    seeds: list[int] = []
    try:
        for word in words.split(","):
            first, _, last = word.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        seeds = []
    if not 0 < len(seeds) <= 1000:
        raise UserError(f"generate: --seeds {words}: give whole numbers from 0, as 7, 1,2,5 or 1-4, at most 1,000")
    return seeds


def texts_of(args: SimpleNamespace) -> "list[Prompt]":
    """The prompts from the arguments or the file."""
    from g2rpo_core.data.prompts import Prompt, read_prompts

    if bool(args.prompts) == bool(args.file):
        raise UserError("generate: give prompts, or a file of them with --file")
    if args.file:
        return read_prompts(args.file)
    return [Prompt(f"{number:04d}", text, "") for number, text in enumerate(args.prompts)]
