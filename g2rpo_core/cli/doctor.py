"""Look at this machine, for `g2rpo doctor`: one block for a bug report."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import psutil
import torch
from huggingface_hub import get_token

from g2rpo_core.cli.preflight import checks
from g2rpo_core.config import Profile, load_profile, profile_path
from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.texts import echo
from g2rpo_core.numerics import driver
from g2rpo_core.numerics.cuda import why_none
from g2rpo_core.numerics.processes import version_of
from g2rpo_core.tasks import TASK_NAMES

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
COMPLETE = "nothing is missing"


def doctor(profile: str | None) -> None:
    """Print what this machine has and what each profile lacks.

    With a profile of published weights, also check the machine against it.
    """
    for line in [*machine(), *tokens(), *profiles(profile)]:
        echo(line)
    if profile:
        preflight(profile)


def preflight(name: str) -> None:
    """Print the checks of a profile of published weights in turn; exit status 1 if one is red."""
    loaded = load_profile(profile_path(name))
    if loaded.models.source != "hub":
        return
    red = 0
    for check in checks(name, loaded):
        echo(check)
        red += not check.good
    if red:
        raise UserError(f"doctor: {red} checks of profile {name} are red")


def machine() -> Iterator[str]:
    """Describe the versions, processors, memory and disk, one line a question."""
    yield f"Python: {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "packages: " + ", ".join(f"{name} {find_version(name)}" for name in PACKAGES)
    yield f"g2rpo: {commit() or 'no git checkout here'}"
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    yield f"CPUs: {os.cpu_count()}"
    yield f"memory: {memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    yield f"disk: {disk.free / GIB:.0f} of {disk.total / GIB:.0f} GiB free here"
    needs = driver.needs(torch.__version__, torch.version.cuda)
    yield (
        f"NVIDIA driver: {driver.find_version() or 'none found'}; "
        f"{needs or f'torch {torch.__version__} uses none'}"
    )
    if not torch.cuda.is_available():
        yield f"GPU: torch finds none: {why_none()}; profile tiny works, flux_* would take weeks"
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"GPU {index}: {name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, "
            f"CUDA {torch.version.cuda}"
        )


def tokens() -> Iterator[str]:
    """Say which tokens are set, never their values."""
    yield (
        "tokens in the environment: "
        f"{', '.join(name for name in TOKENS if os.environ.get(name)) or 'none'}"
    )
    yield f"Hugging Face hub: {'logged in' if get_token() else 'not logged in (hf auth login)'}"


def profiles(only: str | None) -> Iterator[str]:
    """Say what each profile still needs: of all, in a line those that need the same.

    UserError if the only one does not load.
    """
    lacking: Iterable[str]
    if only:
        lacking = missing(only, load_profile(profile_path(only)))
        yield f"profile {only}: {'; '.join(lacking) or COMPLETE}"
        return
    alike: dict[str, list[str]] = {}
    for name in sorted(path.stem for path in Path("profiles").glob("*.yaml")):
        loaded, wrong = attempt(partial(load_profile, profile_path(name)))
        lacking = missing(name, loaded) if loaded else wrong
        alike.setdefault("; ".join(lacking) or COMPLETE, []).append(name)
    if not alike:
        yield "profiles: no folder `profiles` here: run it in the project's checkout"
    for needs, names in sorted(alike.items(), key=lambda each: (each[0] != COMPLETE, each[1])):
        yield f"profile{'s' * (len(names) > 1)} {', '.join(names)}: {needs}"


def missing(name: str, profile: Profile) -> Iterator[str]:
    """Yield what `dvc repro` of a profile needs, or makes first."""
    base = profile.models.repos["pipeline"] if profile.models.source == "hub" else None
    if base and base.folder and not Path(base.folder).exists():
        yield f"the base model's folder {base.folder}"
    if base and base.repo and not get_token():
        yield "a token, if its base model is gated (hf auth login)"
    for part, named in (("train", "training"), ("test", "test")):
        source = getattr(profile.prompts, part)
        if isinstance(source, str) and source not in TASK_NAMES and not Path(source).exists():
            yield f"the {named} prompts {source}"
        if not isinstance(source, str) and not Path("prompts", name, f"{part}.parquet").exists():
            yield f"the {named} prompts of {source.repo}, which dvc repro fetches"
    if not Path("models", name, "models.lock.json").exists():
        yield "its models, which dvc repro makes or fetches"


def find_version(package: str) -> str:
    """Return a package's version, or `missing`."""
    return (
        attempt(partial(version_of, package), importlib.metadata.PackageNotFoundError)[0]
        or "missing"
    )


def commit() -> str | None:
    """Return the checkout's commit, with `+` if files differ from it; None outside a checkout."""
    git = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True)
    if not shutil.which("git") or (head := git("rev-parse", "--short", "HEAD")).returncode:
        return None
    return head.stdout.strip() + (
        "+" if git("status", "--porcelain", "--untracked-files=no").stdout.strip() else ""
    )
