"""`g2rpo generate`: pictures of any prompt by the base, a trained run, or both one after the other."""

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
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="texts; or --file")] = None,
    file: Annotated[Path | None, typer.Option(help="prompts, as a profile takes them: txt, csv, jsonl or parquet")] = None,
    run: Annotated[str, typer.Option(help="`base`, a run as g2rpo-1, or a folder that has `transformer` or `lora`")] = BASE[0],
    profile: Annotated[
        str | None, typer.Option(help="whose models and image size are used; the one that params.yaml names")
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="of the initial noise: 7, or 1,2,5, or 1-4; the same noise for every prompt and run")
    ] = "0",
    steps: Annotated[int | None, typer.Option(help="denoising steps; the first of evaluation.steps")] = None,
    guidance: Annotated[float | None, typer.Option(help="as sampling.guidance")] = None,
    trained_share: Annotated[float, typer.Option(help="of the steps, from the noisy end; the base does the others")] = 1.0,
    lora_scale: Annotated[float, typer.Option(help="strength of a run that is a LoRA, times its alpha / rank")] = 1.0,
    out: Annotated[Path, typer.Option(help="a folder, which may have files already")] = Path("pictures"),
    grid: Annotated[bool, typer.Option("--grid", help="one more picture: a row a prompt, a column a seed")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; a GPU if there is one")] = None,
) -> None:
    """Pictures of prompts as PNG, each with what it was made by in its metadata.

    A prompt that the text encoders would cut is refused.

    Example: g2rpo generate "a small red circle" --run g2rpo-1 --seeds 1-4 --grid
    """
    draw(SimpleNamespace(**locals()))


def draw(args: SimpleNamespace) -> None:
    """UserError before any model is loaded where the words say something that is not there."""
    from g2rpo_core.config import load_profile, load_run, profile_path

    profile = args.profile or load_run().profile
    settings = load_profile(profile_path(profile))
    seeds, folder = seeds_of(args.seeds), folder_of(args.run, profile)
    steps = settings.evaluation.steps[0] if args.steps is None else args.steps
    guidance = settings.sampling.guidance if args.guidance is None else args.guidance
    if steps < 1 or not 0 < args.trained_share <= 1:
        raise UserError("generate: --steps must be at least 1, and --trained-share above 0 and at most 1")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"generate: --out {args.out} is no folder")
    prompts = texts_of(args)

    import torch
    from torchvision.utils import save_image

    from g2rpo_core.inference.pictures import Painter, png

    painter = Painter(settings, Path("models", profile), args.device)
    encoded = painter.encode(prompts)
    args.out.mkdir(parents=True, exist_ok=True)
    how = {"steps": steps, "guidance": guidance, "trained_share": args.trained_share, "lora_scale": args.lora_scale}
    about = {"profile": profile, "run": args.run, "shift": painter.shift_of(painter.policy(folder)), **how}
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
    """The prompts of the words or the file."""
    from g2rpo_core.data.prompts import Prompt, read_prompts

    if bool(args.prompts) == bool(args.file):
        raise UserError("generate: give prompts, or a file of them by --file")
    if args.file:
        return read_prompts(args.file)
    return [Prompt(f"{number:04d}", text, "") for number, text in enumerate(args.prompts)]
