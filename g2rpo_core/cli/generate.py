"""`g2rpo generate`: pictures of any prompt by the base, a trained run, or both one after the other."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.common.runs import BASE
from g2rpo_core.config import load_profile, load_run, profile_path
from g2rpo_core.errors import UserError
from g2rpo_core.files import reading

if TYPE_CHECKING:
    import torch

    from g2rpo_core.data.embeddings import Conditioning
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
    profile = args.profile or load_run().profile
    settings = load_profile(profile_path(profile))
    evaluation, sampling = settings.evaluation, settings.sampling
    seeds, folder = seeds_of(args.seeds), folder_of(args.run, profile)
    steps = evaluation.steps[0] if args.steps is None else args.steps
    guidance = sampling.guidance if args.guidance is None else args.guidance
    if steps < 1 or not 0 < args.trained_share <= 1:
        raise UserError("generate: --steps must be at least 1, and --trained-share above 0 and at most 1")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"generate: --out {args.out} is no folder")

    import torch
    from PIL.PngImagePlugin import PngInfo
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import save_image

    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.common.seeding import generator
    from g2rpo_core.data.embeddings import DTYPES
    from g2rpo_core.models.flux import Policy
    from g2rpo_core.models.generate import draw as draw_images
    from g2rpo_core.models.generate import published_shift

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"generate: --device {args.device}: torch finds no GPU here")
    models = ModelStore(Path("models", profile))
    pipeline = models.folder("pipeline")
    prompts, conditioning = encoded(pipeline, texts_of(args), settings.embed, device)
    how = {
        "height": evaluation.height,
        "width": evaluation.width,
        "guidance": guidance,
        "dtype": DTYPES[sampling.dtype],
        "device": device,
    }
    policy = Policy.load(pipeline, folder, **how)
    if folder and args.trained_share < 1:
        policy.use_base(pipeline)
    shift = published_shift(pipeline, policy.image_tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, prompt in enumerate(prompts):
        one = part(conditioning, number, len(seeds))
        initial = torch.stack([policy.noise(generator("generate", seed)) for seed in seeds])
        share = args.trained_share if folder else 1.0
        images = draw_images(policy, one, initial, steps, shift, evaluation.batch, share).cpu()
        rows.append(images)
        for seed, image in zip(seeds, images):
            about = PngInfo()
            made = {
                "prompt": prompt.text,
                "seed": seed,
                "steps": steps,
                "guidance": guidance,
                "shift": shift,
                "trained_share": args.trained_share,
            }
            about.add_text("g2rpo", json.dumps({"profile": profile, "run": args.run, **made}))
            path = args.out / f"{args.run.replace('/', '_')}-{number:04d}-{seed}.png"
            to_pil_image(image.clamp(0, 1)).save(path, pnginfo=about)
            print(path)
    if args.grid:
        path = args.out / f"{args.run.replace('/', '_')}-grid.png"
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


def folder_of(run: str, profile: str) -> Path | None:
    """Where the weights of a run are; None for the base."""
    if run == BASE[0]:
        return None
    known = Path("runs", profile)
    for folder in (known / run, Path(run)):
        if (folder / "transformer").exists() or (folder / "lora").exists():
            return folder
    there = sorted(path.name for path in known.glob("*") if path.is_dir())
    raise UserError(f"generate: --run {run}: no trained weights; of {profile} there are {', '.join(['base', *there])}")


def texts_of(args: SimpleNamespace) -> "list[Prompt]":
    """The prompts of the words or the file."""
    from g2rpo_core.data.prompts import Prompt, read_prompts

    if bool(args.prompts) == bool(args.file):
        raise UserError("generate: give prompts, or a file of them by --file")
    if args.file:
        return read_prompts(args.file)
    return [Prompt(f"{number:04d}", text, "") for number, text in enumerate(args.prompts)]


def encoded(pipeline: Path, prompts: "list[Prompt]", settings, device: "torch.device") -> "tuple[list[Prompt], Conditioning]":
    """The prompts by the pipeline's text encoders; UserError for one that they would cut."""
    import torch
    from diffusers import FluxPipeline
    from diffusers.utils.logging import disable_progress_bar
    from transformers.utils.logging import disable_progress_bar as disable_of_encoders

    from g2rpo_core.common.model_store import AGAIN
    from g2rpo_core.data.embeddings import DTYPES, Conditioning, check_lengths, encode

    disable_progress_bar()
    disable_of_encoders()
    with reading(pipeline, AGAIN):
        encoders = FluxPipeline.from_pretrained(pipeline, transformer=None, vae=None, dtype=DTYPES[settings.dtype])
    encoders.to(device)
    check_lengths(prompts, encoders.tokenizer_2, settings.max_sequence_length)
    rows = [one for _, one in encode(encoders, prompts, settings.max_sequence_length, settings.batch)]
    return prompts, Conditioning(
        torch.stack([row.context for row in rows]).float(), torch.stack([row.pooled for row in rows]).float()
    )


def part(conditioning: "Conditioning", number: int, times: int) -> "Conditioning":
    """One prompt's encoding, so many times."""
    from g2rpo_core.data.embeddings import Conditioning

    repeat = lambda tensor: tensor[number : number + 1].expand(times, *tensor.shape[1:])
    return Conditioning(repeat(conditioning.context), repeat(conditioning.pooled))
