"""Look at this machine, for `g2rpo doctor`: one block for a bug report, and the checks of a run."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import psutil
import torch
from httpx2 import HTTPError
from huggingface_hub import HfApi, constants, get_token, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from g2rpo_core.config import Profile, load_profile, profile_path
from g2rpo_core.distributed.process_group import num_processes
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import Plan, make_plan
from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.texts import echo, visible
from g2rpo_core.hub.download import REVISIONS, explain_error, known_revisions
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
CONNECTS_WITHIN = 120  # seconds
OF_A_PROCESS = 8.0  # GiB of host memory, beside its part of a checkpoint
Check = tuple[bool, str]  # whether it is good, and what it found


def doctor(profile: str | None) -> None:
    """Print what this machine has and what each profile lacks.

    With a profile of published weights, also check the machine against it; exit status 1 if a check
    is red.
    """
    chosen = load_profile(profile_path(profile)) if profile else None
    for line in [*machine(), *profiles(profile)]:
        echo(line)
    red = 0
    for good, text in checks(profile, chosen) if profile and chosen else ():
        echo(f"{'ok' if good else 'RED':4} {visible(text)}")
        red += not good
    if red:
        raise UserError(f"doctor: {red} checks of profile {profile} are red")


def machine() -> Iterator[str]:
    """Describe versions, processors, memory, disk and tokens, one line a question."""
    yield f"Python: {platform.python_version()}, {platform.system()} {platform.machine()}"
    versions = {
        name: attempt(partial(version_of, name), PackageNotFoundError)[0] for name in PACKAGES
    }
    yield "packages: " + ", ".join(f"{name} {versions[name] or 'missing'}" for name in PACKAGES)
    yield f"g2rpo: {commit() or 'no git checkout here'}"
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    yield f"CPUs: {os.cpu_count()}"
    yield f"memory: {memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    yield f"disk: {disk.free / GIB:.0f} of {disk.total / GIB:.0f} GiB free here"
    yield f"NVIDIA driver: {driver.find_version() or 'none found'}; " + (
        driver.needs(torch.__version__, torch.version.cuda)
        or f"torch {torch.__version__} uses none"
    )
    if not torch.cuda.is_available():
        yield f"GPU: torch finds none: {why_none()}; profile tiny works, flux_* would take weeks"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"GPU {index}: {torch.cuda.get_device_name(index)}, "
            f"{free / GIB:.0f} of {total / GIB:.0f} GiB free, CUDA {torch.version.cuda}"
        )
    # Never their values
    yield f"tokens in the environment: {', '.join(filter(os.environ.get, TOKENS)) or 'none'}"
    yield f"Hugging Face hub: {'logged in' if get_token() else 'not logged in (hf auth login)'}"


def profiles(only: str | None) -> Iterator[str]:
    """Say what each profile still needs, or only one: in a line those that need the same."""
    alike: dict[str, list[str]] = {}
    names = [only] if only else sorted(path.stem for path in Path("profiles").glob("[!.]*.yaml"))
    for name in names:
        loaded, wrong = attempt(partial(load_profile, profile_path(name)))
        lacking = [*missing(name, loaded)] if loaded else wrong
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
    for part, named in (("train", "training"), ("test", "test")):
        source = getattr(profile.prompts, part)
        if isinstance(source, str) and source not in TASK_NAMES and not Path(source).exists():
            yield f"the {named} prompts {source}"
        if not isinstance(source, str) and not Path("prompts", name, f"{part}.parquet").exists():
            yield f"the {named} prompts of {source.repo}, which dvc repro fetches"
    if not Path("models", name, "models.lock.json").exists():
        yield "its models, which dvc repro makes or fetches"


def commit() -> str | None:
    """Return the checkout's commit, with `+` if files differ from it; None outside a checkout."""
    if not shutil.which("git"):
        return None
    done = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def checks(name: str, profile: Profile) -> Iterator[Check]:
    """Yield the checks of a profile of published weights, for its first method on all GPUs here."""
    if profile.models.source != "hub":
        return
    method = next(iter(profile.methods))
    gpus = num_processes("auto", profile.run(method).training.prompts_per_iteration)
    found = [torch.cuda.mem_get_info(index)[1] / GIB for index in range(torch.cuda.device_count())]
    plan = make_plan(profile, method, Machines(gpus, min(found, default=0.0)))
    yield (
        bool(found) and plan.fits,
        f"memory: {method} needs {plan.memory_total_gib:.1f} of {min(found):.1f} GiB on each of "
        f"{gpus} GPUs: g2rpo plan --profile {name} --gpus {gpus} --memory {min(found):.0f}"
        if found
        else f"GPUs: torch finds none here: {why_none()}; else go to a node with GPUs",
    )
    yield from _hub(profile)
    yield from _disk(plan)
    total = psutil.virtual_memory().total / GIB
    # The disk has two checkpoints, the host's memory one
    needed = gpus * OF_A_PROCESS + plan.disk_gib["checkpoints"] / 2
    yield total >= needed, f"host memory: {total:.0f} GiB, needs about {needed:.0f}"


def _hub(profile: Profile) -> Iterator[Check]:
    """Ask whether each repository may be downloaded by this account."""
    for name, model in getattr(profile.models, "repos", {}).items():
        what = f"models.repos.{name}: {model.place}"
        if model.folder is not None:
            there = Path(model.folder).exists()
            yield there, f"folder: {what}{'' if there else ' does not exist'}"
            continue
        try:
            revision = model.revision or known_revisions(REVISIONS / "models.json").get(model.repo)
            wanted = {"revision": revision, "allow_patterns": list(model.files)}
            cached = partial(snapshot_download, model.repo, local_files_only=True, **wanted)
            if not (here := attempt(cached, LocalEntryNotFoundError)[0]):
                HfApi().model_info(model.repo, revision=revision, timeout=CONNECTS_WITHIN)
                HfApi().auth_check(model.repo)
            yield True, f"hub: {model.repo}: {'in the cache' if here else 'may be downloaded'}"
        # An answer may be anything
        except (OSError, HTTPError, ValueError, TypeError, LookupError, AttributeError) as error:
            yield False, f"hub: {explain_error(what, model, error)}"


def _disk(plan: Plan) -> Iterator[Check]:
    """Compare what the plan writes with what is free, by disk."""
    home = next(each for each in Path(constants.HF_HOME, "hub").parents if each.exists())
    places = {home: plan.disks["HF_HOME"], Path.cwd(): plan.disks["here"]}
    if home.stat().st_dev == Path.cwd().stat().st_dev:
        places = {Path.cwd(): sum(plan.disks.values())}
    for place, needed in places.items():
        free = shutil.disk_usage(place).free / GIB
        move = "" if free >= needed else "; make room, or move HF_HOME or DVC's cache"
        yield free >= needed, f"disk of {place}: {free:.0f} GiB free, needs {needed:.0f}{move}"
