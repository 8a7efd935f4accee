"""`g2rpo doctor`: what this machine has and what each profile lacks, as one block for a bug report."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "dvc",
    "prefect",
    "open_clip_torch",
    "pyarrow",
    "tensorboard",
    "gradio",
)
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")
GIB = 2**30


def doctor(profile: Annotated[str | None, typer.Option(help="check only this profile")] = None) -> None:
    """Show versions, devices, disk, which tokens are set, and what each profile lacks.

    Example: g2rpo doctor --profile flux_hps
    """
    for line in [*machine(), *tokens(), *profiles(profile)]:
        print(line)


def machine() -> Iterator[str]:
    """The versions, processors, memory and disk."""
    import psutil
    import torch

    yield f"python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "packages: " + ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    yield f"g2rpo: {commit() or 'no git checkout here'}"
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    yield f"{os.cpu_count()} CPUs, {memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB memory free, {disk.free / GIB:.0f} GiB disk free here"
    if not torch.cuda.is_available():
        yield f"no GPU that torch {torch.__version__} can use: profile tiny works, flux_* would take weeks"
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield f"GPU {index}: {about.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, CUDA {torch.version.cuda}"


def tokens() -> Iterator[str]:
    """Which tokens are set, never their values."""
    from huggingface_hub import get_token

    found = [name for name in TOKENS if os.environ.get(name)]
    logged_in = "logged in to the Hugging Face hub" if get_token() else "not logged in to the Hugging Face hub (hf auth login)"
    yield f"tokens: {', '.join(found) or 'none in the environment'}; {logged_in}"


def profiles(only: str | None) -> Iterator[str]:
    """What each profile still needs."""
    from g2rpo_core.config import load_profile, profile_path
    from g2rpo_core.errors import UserError

    names = [only] if only else sorted(path.stem for path in Path("profiles").glob("*.yaml"))
    if not names:
        yield "no folder `profiles` here: run it in the project's checkout"
    for name in names:
        try:
            loaded = load_profile(profile_path(name))
        except UserError as error:
            if only:
                raise
            yield f"profile {name}: {error}"
            continue
        yield f"profile {name}: {'; '.join(missing(name, loaded)) or 'nothing is missing'}"


def missing(name: str, profile) -> Iterator[str]:
    """What `dvc repro` of a profile needs, or makes first."""
    from huggingface_hub import get_token

    from g2rpo_core.worlds.names import WORLD_NAMES

    if profile.models.source == "hub" and not get_token():
        yield "a token for its gated weights (hf auth login)"
    for part, named in (("train", "training"), ("test", "test")):
        source = getattr(profile.prompts, part)
        if isinstance(source, str) and source not in WORLD_NAMES and not Path(source).exists():
            yield f"the {named} prompts {source}"
        if not isinstance(source, str) and not Path("prompts", name, f"{part}.parquet").exists():
            yield f"the {named} prompts of {source.repo}, which dvc repro fetches"
    if not Path("models", name, "models.lock.json").exists():
        yield "its models, which dvc repro makes or fetches"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> str | None:
    """The checkout's commit, with `+` if files differ from it."""
    git = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True)
    if not shutil.which("git") or (head := git("rev-parse", "--short", "HEAD")).returncode:
        return None
    return head.stdout.strip() + ("+" if git("status", "--porcelain", "--untracked-files=no").stdout.strip() else "")
