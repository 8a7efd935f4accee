"""Define the commands that look and change nothing: `g2rpo doctor` at this machine, and `g2rpo profile` at settings.

`doctor` prints what this machine has and what each profile lacks, as one block for a bug report; `profile` lists the profiles, shows one with
the source of each value, or compares two.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from g2rpo_core.foundation import driver
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import read_text
from g2rpo_core.foundation.texts import visible

if TYPE_CHECKING:  # these import torch and diffusers, which would slow down --help
    from g2rpo_core.config import Profile

PACKAGES = (
    "torch", "diffusers", "transformers", "accelerate", "peft", "dvc", "prefect", "open_clip_torch", "pyarrow", "tensorboard", "gradio",
)  # fmt: skip
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")
GIB = 2**30
WIDTH = 130


app = typer.Typer(name="profile", help="List, show or compare profiles.", no_args_is_help=True)


def doctor(profile: Annotated[str | None, typer.Option(help="check only this profile")] = None) -> None:
    """Show versions, devices, disk, which tokens are set, and what each profile lacks.

    With --profile and published weights also check this machine against it: GPUs and their memory, an all-reduce, access to every
    repository, disks, host memory, locks, addresses. Exit status 1 if a check is red.

    Example: g2rpo doctor --profile flux_hps
    """
    for line in [*machine(), *tokens(), *profiles(profile)]:
        print(line)
    if profile:
        preflight(profile)


def preflight(name: str) -> None:
    """Print every check of a profile of published weights as it is made; exit status 1 if one is red."""
    from g2rpo_core.cli.preflight import checks
    from g2rpo_core.config import load_profile, profile_path

    loaded = load_profile(profile_path(name))
    if loaded.models.source != "hub":
        return
    red = 0
    for check in checks(name, loaded):
        print(check, flush=True)
        red += not check.good
    if red:
        raise UserError(f"doctor: {red} checks of profile {name} are red")


def machine() -> Iterator[str]:
    """Describe the versions, processors, memory and disk."""
    import psutil
    import torch

    from g2rpo_core.common.cuda import why_none
    from g2rpo_core.numerics import probe

    yield f"python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "packages: " + ", ".join(f"{name} {find_version(name)}" for name in PACKAGES)
    yield f"g2rpo: {commit() or 'no git checkout here'}"
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    yield f"{os.cpu_count()} CPUs, {memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB memory free, {disk.free / GIB:.0f} GiB disk free here"
    yield probe.check_machine()
    needs = driver.needs(torch.__version__, torch.version.cuda)
    yield f"NVIDIA driver: {driver.find_version() or 'none found'}; {needs or f'torch {torch.__version__} uses none'}"
    if not torch.cuda.is_available():
        yield f"GPU: torch finds none: {why_none()}; profile tiny works, flux_* would take weeks"
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        free, total = torch.cuda.mem_get_info(index)
        yield f"GPU {index}: {name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, CUDA {torch.version.cuda}"


def tokens() -> Iterator[str]:
    """Say which tokens are set, never their values."""
    from huggingface_hub import get_token

    names = [name for name in TOKENS if os.environ.get(name)]
    logged_in = "logged in to the Hugging Face hub" if get_token() else "not logged in to the Hugging Face hub (hf auth login)"
    yield f"tokens: {', '.join(names) or 'none in the environment'}; {logged_in}"


def profiles(only: str | None) -> Iterator[str]:
    """Say what each profile still needs."""
    from g2rpo_core.config import load_profile, profile_path
    from g2rpo_core.foundation.errors import UserError

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
    """Yield what `dvc repro` of a profile needs, or makes first."""
    from huggingface_hub import get_token

    from g2rpo_core.tasks import TASK_NAMES

    if profile.models.source == "hub" and not get_token():
        yield "a token for its gated weights (hf auth login)"
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
    from g2rpo_core.common.processes import version_of

    try:
        return version_of(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> str | None:
    """Return the checkout's commit, with `+` if files differ from it; None outside a checkout."""
    git = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True)
    if not shutil.which("git") or (head := git("rev-parse", "--short", "HEAD")).returncode:
        return None
    return head.stdout.strip() + ("+" if git("status", "--porcelain", "--untracked-files=no").stdout.strip() else "")


@app.command("list")
def list_profiles() -> None:
    """List the profiles of this folder, each with the first sentence of its comment.

    Example: g2rpo profile list
    """
    for path in sorted(Path("profiles").glob("*.yaml")):
        try:
            lines = read_text(path).splitlines()
        except UserError as error:  # still list the others
            print(f"{path.stem:16} {error}")
            continue
        comment = " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))
        print(f"{path.stem:16} {visible(comment.split('. ')[0].rstrip('.'))}")


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="name of a file in profiles/")]) -> None:
    """Show the whole profile, with the source of each value.

    Example: g2rpo profile show flux_hps
    """
    from g2rpo_core.config import load_profile, profile_path, resolve

    path = profile_path(name)
    shown = _annotated(_settings(load_profile(path)), "", resolve(path).origin)
    yaml = YAML(typ="rt", pure=True)
    yaml.width = WIDTH
    yaml.representer.add_representer(type(None), lambda self, _: self.represent_scalar("tag:yaml.org,2002:null", "null"))
    yaml.dump(shown, sys.stdout)


@app.command("diff")
def diff(
    first: Annotated[str, typer.Argument(help="name of a file in profiles/")],
    second: Annotated[str, typer.Argument(help="another")],
) -> None:
    """Show the settings in which two profiles differ, one per line: key, first value, second value.

    Example: g2rpo profile diff flux_hps flux_lora_1gpu
    """
    from g2rpo_core.config import load_profile, profile_path

    both = [_settings(load_profile(profile_path(name))) for name in (first, second)]
    for name in dict.fromkeys([*both[0]["methods"], *both[1]["methods"]]):
        # an entry that only one of them has is listed as a whole, not setting by setting
        if sum(name in each["methods"] for each in both) == 1:
            for each in both:
                each["methods"][name] = "there" if name in each["methods"] else "not there"
    values = [dict(_leaves(each)) for each in both]
    for key in dict.fromkeys([*values[0], *values[1]]):
        before, after = (str(each[key]) if key in each else "-" for each in values)
        if before != after:
            print(f"{key}: {before} -> {after}")


def _leaves(value: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, field in value.items():
        inner = field.model_dump(mode="json") if isinstance(field, BaseModel) else field
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _settings(profile: "Profile") -> dict:
    """Return every section, the methods with their published settings."""
    data = {name: getattr(profile, name) for name in type(profile).model_fields}
    data["methods"] = {
        name: {**run.model_dump(mode="json", exclude={"settings"}), "settings": profile.run(name).method}
        for name, run in profile.methods.items()
    }
    return data


def _annotated(value: BaseModel | dict, prefix: str, origin: dict[str, str]) -> CommentedMap:
    """Return a mapping with a comment on each leaf: the `file:line` that sets it, `default`, or `published`."""
    items = {name: getattr(value, name) for name in type(value).model_fields} if isinstance(value, BaseModel) else dict(value)
    shown = CommentedMap()
    for key, field in items.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(field, BaseModel) or (isinstance(field, dict) and field):
            shown[key] = _annotated(field, name, origin)
            continue
        shown[key] = CommentedSeq(field) if isinstance(field, tuple | list) else field
        if isinstance(shown[key], CommentedSeq):
            shown[key].fa.set_flow_style()
        inherited = "published" if name.startswith("methods.") and ".settings." in name else "default"
        shown.yaml_add_eol_comment(origin.get(name, inherited), key)
    return shown
