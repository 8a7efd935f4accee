"""Define the commands of `g2rpo`: their options and help, without the code that runs.

Nothing here imports torch, so that help and completion need no second. A command's module loads
when it runs: `lazy` calls the function of the same name there, whose parameters are the command's.
"""

import functools
import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.models import OptionInfo

from g2rpo_core.cli import checkout
from g2rpo_core.estimate.cards import CARDS
from g2rpo_core.estimate.machines import BETWEEN, INSIDE
from g2rpo_core.foundation.errors import require
from g2rpo_core.foundation.profiles import read_chain, study_path
from g2rpo_core.foundation.runs import BASE
from g2rpo_core.numerics.pins import pin_profile


def option(help: str, min: float | None = None, max: float | None = None) -> OptionInfo:
    """Return an option whose help comes first, so that most options fit on one line."""
    return typer.Option(help=help, min=min, max=max)


OfRewards = Annotated[
    str | None,
    option("profile whose models and section `rewards` are used (default: the one in params.yaml)"),
]
ModelsOfRewards = Annotated[
    Path | None,
    option(
        "another folder made by the stage `models`; without --profile, "
        "rewards then have their default settings"
    ),
]
PublishedRewards = Annotated[
    bool,
    typer.Option(
        "--published",
        help="fetch the published weights of these rewards from the hub, without a pipeline: "
        "those of --profile (default: flux_hps_clip)",
    ),
]
Device = Annotated[str | None, option("cuda or cpu (default: a GPU if there is one)")]

app = typer.Typer(
    name="g2rpo",
    help="Align flow text-to-image models by online RL: the tools around the pipeline. "
    "`dvc repro` runs the pipeline itself.",
    epilog="`make help` lists the first things to try, with their commands. Exit status: "
    "0 success, 1 an error that one line explains, 2 wrong usage, 75 a temporary failure: "
    "try again later.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)
profiles = typer.Typer(name="profile", help="List, show or compare profiles.", no_args_is_help=True)
app.add_typer(profiles)


def lazy(module: str, *needs: str, pins: bool = False) -> Callable[[Callable], Callable]:
    """Run a command by the function of its name in a module that loads then.

    needs: an extra of this package, and the modules that are there with it; pins: compute by the
    profile's numerics.
    """

    def wrap(signature: Callable) -> Callable:
        @functools.wraps(signature)
        def run(**options: object) -> None:
            # Weights that are named without a profile are read by native numerics
            named = options.get("models") or options.get("published")
            if pins and (options.get("profile") or not named):
                _pin(options)
            if needs:
                require(f"g2rpo {signature.__name__.replace('_', '-')}", *needs)
            gc.disable()  # for the imports, see stages/start.py
            loaded = import_module(f"g2rpo_core.cli.{module}")
            gc.enable()
            getattr(loaded, signature.__name__)(**options)

        return run

    return wrap


def _pin(options: Mapping[str, object]) -> None:
    """Set what numpy and torch read when they load, for the profile that the options name."""
    name, study = options.get("profile"), options.get("study")
    if study and (file := study_path(str(study))).exists():
        name = read_chain(file).data.get("profile")
    pin_profile(None if name is None else str(name))


@app.command("doctor")
@lazy("doctor")
def doctor(
    profile: Annotated[str | None, option("check only this profile")] = None,
) -> None:
    """Show versions, devices, disk, which tokens are set, and what each profile lacks.

    With --profile and published weights also check this machine against it: GPUs and their memory,
    access to every repository, disks, host memory. Exit status 1 if a check is red.

    Example: g2rpo doctor --profile flux_hps
    """


@profiles.command("list")
@lazy("profiles")
def list_profiles() -> None:
    """List the profiles of this folder, each with the first sentence of its comment.

    Example: g2rpo profile list
    """


@profiles.command("show")
@lazy("profiles")
def show(name: Annotated[str, typer.Argument(help="name of a file in profiles/")]) -> None:
    """Show the whole profile, with the source of each value.

    Example: g2rpo profile show flux_hps
    """


@profiles.command("diff")
@lazy("profiles")
def diff(
    first: Annotated[str, typer.Argument(help="name of a file in profiles/")],
    second: Annotated[str, typer.Argument(help="another")],
) -> None:
    """Show the settings in which two profiles differ, one per line: key, first value, second value.

    Example: g2rpo profile diff flux_hps flux_lora_1gpu
    """


@app.command("plan")
@lazy("plan")
def plan(
    profile: checkout.Name = None,
    method: Annotated[str, option("an entry of the profile's methods")] = "g2rpo",
    gpus: Annotated[int, option("GPUs on all nodes together")] = 1,
    nodes: Annotated[
        int | None, option("number of nodes (default: as few as possible, with up to 8 GPUs each)")
    ] = None,
    card: Annotated[
        str | None,
        option(
            f"the GPUs' memory and rate, of {', '.join(CARDS)}; --memory and --rate go before it"
        ),
    ] = None,
    memory: Annotated[
        float | None,
        option(
            "GiB per GPU, as torch sees them: a card of 80 GB has 79 (the default), "
            "of 141 GB 139, of 24 GB 23"
        ),
    ] = None,
    shard: Annotated[
        int | None,
        option("GPUs that share one model, a divisor of --gpus (default: as the profile says)"),
    ] = None,
    inside: Annotated[float, option("GB/s from a GPU to the others on its node")] = INSIDE,
    between: Annotated[float, option("GB/s from a GPU to those on other nodes")] = BETWEEN,
    rate: Annotated[
        float | None,
        option("milliseconds per forward evaluation (default: an assumed rate)"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="print one JSON object on the last line")
    ] = False,
) -> None:
    """Estimate what a profile needs, before you rent machines: memory, hours, GPU-hours, disk.

    Example: g2rpo plan --profile flux_hps_clip --gpus 16 --memory 139
    """


for name, (module, help_text, example) in checkout.COMMANDS.items():
    app.command(
        name,
        help=f"{help_text}\n\nExample: g2rpo {name} {example}",
        context_settings=checkout.ANY_ARGUMENTS,
    )(checkout.make_command(name, module))
app.command("models")(checkout.models)
app.command("prompts")(checkout.prompts)


Judge = Annotated[
    str | None,
    option(
        "with --cliff: a reward that must not be lost, such as verifier (default: the first of "
        "training.monitor.rewards that is not trained)"
    ),
]


@app.command("probe")
@lazy("probe", pins=True)
def probe(
    profile: Annotated[str | None, option("default: the one in params.yaml")] = None,
    study: Annotated[
        str | None,
        option(
            "instead of --profile: a study's entries and changes, or one of its bases, "
            "as my_study/base-2"
        ),
    ] = None,
    run: Annotated[
        str, option("`base`, a run such as g2rpo-1, or a folder with `transformer` or `lora`")
    ] = BASE[0],
    prompts: Annotated[
        int | None,
        option(
            "how many training prompts, the first ones (default: 16); with --cliff of the test "
            "prompts (default: 64)"
        ),
    ] = None,
    group: Annotated[
        int | None, option("members of a group (default: training.num_generations)")
    ] = None,
    granularities: Annotated[
        str, option("step sizes of the tails, rising, the finest first")
    ] = "1,2,3",
    seed: Annotated[int, option("of the noise")] = 0,
    device: Device = None,
    methods: Annotated[
        str, option("with --cliff: entries of the profile, as mix_grpo,dance_grpo")
    ] = "",
    judge: Judge = None,
    cliff: Annotated[
        bool,
        typer.Option(
            "--cliff",
            help="train --methods for some steps at several rates: which loses a held-out score",
        ),
    ] = False,
    rates: Annotated[
        str, option("with --cliff: factors of an entry's learning rate, rising")
    ] = "1,2,4,8",
    updates: Annotated[int, option("with --cliff: optimizer steps at each rate")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="print a JSON list instead of the table")
    ] = False,
) -> None:
    """Measure, before training, how rewards spread with noise at each step, and how tails agree.

    It needs the stages models and embed. Noise that changes no score teaches nothing: choose
    sde_steps where the spread is large for its evaluations, and coarser tails where their
    correlation with the finest is near 1. With --cliff it trains entries for some optimizer steps
    at 1, 2, 4 and 8 times their learning rate, and says from which on a held-out score falls: begin
    with a quarter of that.

    Example: g2rpo probe --prompts 32 --granularities 1,3
    """


@app.command("generate")
@lazy("generate", pins=True)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="prompts; or use --file")
    ] = None,
    file: Annotated[
        Path | None,
        option("file of prompts, in a format that profiles take: txt, csv, json, jsonl or parquet"),
    ] = None,
    run: Annotated[
        list[str] | None,
        option(
            "`base` (the default), a run such as g2rpo-1, or a folder with `transformer` or "
            "`lora`; may be repeated"
        ),
    ] = None,
    profile: Annotated[
        str | None,
        option("profile whose models and image size are used (default: the one in params.yaml)"),
    ] = None,
    seeds: Annotated[
        str,
        option(
            "seeds of the initial noise: 7, 1,2,5 or 1-4; every prompt and run gets the same noise"
        ),
    ] = "0",
    steps: Annotated[
        int | None, option("denoising steps (default: the first of evaluation.steps)")
    ] = None,
    guidance: Annotated[
        float | None,
        option(
            "guidance scale (default: that which each run was trained with, "
            "and for the base that of the runs beside it)"
        ),
    ] = None,
    trained_share: Annotated[
        float, option("share of the steps, from the noisy end, by the run; the base does the rest")
    ] = 1.0,
    lora_scale: Annotated[float, option("strength of a LoRA run, times its alpha / rank")] = 1.0,
    out: Annotated[Path, option("output folder; it may already hold files")] = Path("pictures"),
    grid: Annotated[
        bool,
        typer.Option(
            "--grid",
            help="also write one picture of all: a row per prompt, the runs side by side, "
            "a column per seed",
        ),
    ] = False,
    device: Device = None,
) -> None:
    """Draw prompts as PNG files; each file's metadata says how it was made.

    Beside them, prompts.csv says which prompt and seed each is of, for `g2rpo score`. Prompts that
    are too long for the text encoders are refused. No other picture is written over: with other
    prompts or settings, the numbers in the names go on.

    Example: g2rpo generate "a small red circle" --run base --run g2rpo-1 --seeds 1-4 --grid
    """


@app.command("score")
@lazy("score", pins=True)
def score(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of images")],
    reward: Annotated[
        list[str],
        option(
            "hps, clip_score, pickscore, image_reward, unified_reward, hpsv3, ocr, geneval, "
            "(hps_v2_1 is hps), or one of your own in the profile's section `rewards`; "
            "several with commas, or it may be repeated"
        ),
    ],
    prompts: Annotated[
        Path | None,
        option(
            "text file with line n for the n-th image in natural order (2.png before 10.png), "
            "or csv, jsonl or Parquet with columns "
            "file,prompt or, as others name them, image_path,caption (default: "
            "DIR's prompts.csv, metadata.csv or metadata.jsonl, or a .txt beside each image)"
        ),
    ] = None,
    out: Annotated[Path, option(".csv or .parquet")] = Path("scores.csv"),
    profile: OfRewards = None,
    models: ModelsOfRewards = None,
    published: PublishedRewards = False,
    worst: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="also print the N images with the lowest scores by the first reward",
        ),
    ] = None,
) -> None:
    """Score a folder of images: a table of `file`, `prompt` and a column for each reward.

    A reward that can fail on an image has a second column, `<name>_reason`: why there is no score.

    Example: g2rpo score --reward hps --prompts prompts.txt pictures

    Example: g2rpo score --published --reward hps,clip_score --worst 10 pictures
    """


@app.command("demo")
@lazy("demo", "demo", "gradio", pins=True)
def demo(
    profile: Annotated[
        str | None,
        option(
            "profile whose models, runs and image size are used (default: the one in params.yaml)"
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        option(
            "folder with `transformer` or `lora`, in addition to the profile's runs; "
            "may be repeated"
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="of the page")] = 7860,
    host: Annotated[
        str,
        option(
            "address of this machine to listen on, so that others can reach it; "
            "there is no password"
        ),
    ] = "127.0.0.1",
    device: Device = None,
    open: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
) -> None:
    """Serve a page that draws prompts with base and runs side by side, and scores them.

    Example: g2rpo demo --open
    """


@app.command("serve-reward")
@lazy("serve_reward", "serve", "fastapi", "uvicorn", pins=True)
def serve_reward(
    reward: Annotated[
        str,
        option("a built-in reward (hps_v2_1 is hps), or one from the profile's section `rewards`"),
    ],
    profile: OfRewards = None,
    models: ModelsOfRewards = None,
    published: PublishedRewards = False,
    host: Annotated[
        str, option("address of this machine to listen on; 0.0.0.0 means all")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="0 takes any free port; the first line of output names it"
        ),
    ] = 8700,
    device: Annotated[
        str | None, option("cuda, cuda:1 or cpu (default: a GPU if there is one)")
    ] = None,
    max_request_mib: Annotated[int, typer.Option(min=1, help="larger requests are refused")] = 512,
    key_variable: Annotated[
        str | None, option("environment variable with a key that requests must then send")
    ] = None,
) -> None:
    """Serve a reward over HTTP until Ctrl-C or SIGTERM. The protocol is in docs/reward_servers.md.

    Example: g2rpo serve-reward --reward hps --profile tiny --port 8700
    """


@app.command("export")
@lazy("export")
def export(
    run: Annotated[
        str,
        typer.Argument(
            help="a run such as g2rpo-1, or a path: a run's folder, "
            "or a transformer or LoRA of others"
        ),
    ],
    form: Annotated[
        Literal["diffusers", "original", "lora", "peft", "kohya"],
        option(
            "diffusers: a folder for from_pretrained; original: "
            "one file with the first publisher's names, for ComfyUI's "
            "diffusion_models (FLUX.1, FLUX.2, Z-Image); for a LoRA: lora (diffusers and ComfyUI), "
            "peft (PeftModel.from_pretrained) or "
            "kohya (programs that read sd-scripts' names)"
        ),
    ],
    out: Annotated[Path, option("a new folder")],
    profile: Annotated[
        str | None, option("profile of the run (default: the one in params.yaml)")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], option("float32 as trained, or bfloat16 for half the size")
    ] = "float32",
    push: Annotated[
        str | None,
        typer.Option(
            metavar="REPO",
            help="upload the folder to this hub repository (user/name); private if it is new",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="with --push: make the repository public")
    ] = False,
) -> None:
    """Write a run's trained weights in a form that other programs read, with a model card.

    Example: g2rpo export g2rpo-1 --form original --out my_model
    """


app.command("report")(checkout.report)
