"""Check this machine against a profile of published weights: a line a check, with what to do."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from httpx2 import HTTPError
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from g2rpo_core.config import Profile
from g2rpo_core.distributed.process_group import num_processes
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import Plan, make_plan
from g2rpo_core.foundation.errors import attempt
from g2rpo_core.foundation.texts import visible
from g2rpo_core.hub.download import REVISIONS, explain_error, known_revisions
from g2rpo_core.numerics.cuda import why_none

GIB = 2**30
CONNECTS_WITHIN = 120  # seconds
OF_A_PROCESS = 8.0  # GiB of host memory, beside its part of a checkpoint


@dataclass(frozen=True)
class Check:
    """What one check found."""

    good: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.good else 'RED':4} {visible(self.text)}"


def checks(name: str, profile: Profile) -> Iterator[Check]:
    """Yield the checks of a profile of published weights, for its first method on all GPUs here."""
    method = next(iter(profile.methods))
    gpus = num_processes("auto", profile.run(method).training.prompts_per_iteration)
    found = [
        torch.cuda.get_device_properties(index).total_memory / GIB
        for index in range(torch.cuda.device_count())
    ]
    plan = make_plan(profile, method, Machines(gpus, min(found, default=0.0)))
    yield from _gpus(name, method, gpus, found, plan)
    yield _network(max(2, gpus) if not found else gpus)
    yield from _hub(profile)
    yield from _disk(plan)
    yield _host(gpus, plan)
    yield _locks()
    yield _address()


def _gpus(name: str, method: str, gpus: int, found: list[float], plan: Plan) -> Iterator[Check]:
    """Say whether torch finds GPUs, and whether a method fits them."""
    if not found:
        yield Check(
            False, f"GPUs: torch finds none here: {why_none()}; else go to a node with GPUs"
        )
        return
    yield Check(
        True,
        f"GPUs: {len(found)} of {min(found):.1f} GiB, CUDA {torch.version.cuda}; {gpus} take part",
    )
    more = (
        ""
        if plan.fits
        else (
            f"; g2rpo plan --profile {name} --gpus {gpus} --memory {min(found):.0f} says what "
            "takes it"
        )
    )
    yield Check(
        plan.fits,
        f"memory: {method} needs {plan.memory_total_gib:.1f} GiB per GPU by the plan{more}",
    )


def _network(processes: int) -> Check:
    """Sum over processes, as training does."""
    if processes == 1:
        return Check(True, "all-reduce: one process needs none")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    try:
        done = subprocess.run(
            [*command, "-m", "g2rpo_core.cli.bandwidth"],
            capture_output=True,
            text=True,
            timeout=CONNECTS_WITHIN,
        )
    except subprocess.TimeoutExpired:
        return Check(
            False,
            f"all-reduce: not done in {CONNECTS_WITHIN} s; NCCL_DEBUG=INFO says where it waits",
        )
    said = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or "WRONG" in said:
        why = said or next(
            (line for line in reversed(done.stderr.splitlines()) if "Error" in line),
            f"status {done.returncode}",
        )
        return Check(False, f"all-reduce: {why.strip()[:200]}; NCCL_DEBUG=INFO says more")
    return Check(True, f"all-reduce: {said}")


def _hub(profile: Profile) -> Iterator[Check]:
    """Ask whether each repository may be downloaded by this account."""
    for name, model in getattr(profile.models, "repos", {}).items():
        what = f"models.repos.{name}: {model.place}"
        if model.folder is not None:
            lacks = "" if Path(model.folder).exists() else " does not exist"
            yield Check(not lacks, f"folder: {what}{lacks}")
            continue
        try:
            revision = model.revision or known_revisions(REVISIONS / "models.json").get(model.repo)
            wanted = {"revision": revision, "allow_patterns": list(model.files)}
            if attempt(
                partial(snapshot_download, model.repo, local_files_only=True, **wanted),
                LocalEntryNotFoundError,
            )[0]:
                yield Check(True, f"hub: {model.repo}: in the cache")
                continue
            HfApi().model_info(model.repo, revision=revision, timeout=CONNECTS_WITHIN)
            HfApi().auth_check(model.repo)
        # An answer may be anything
        except (OSError, HTTPError, ValueError, TypeError, LookupError, AttributeError) as error:
            yield Check(False, f"hub: {explain_error(what, model, error)}")
            continue
        yield Check(True, f"hub: {model.repo}: may be downloaded")


def _disk(plan: Plan) -> Iterator[Check]:
    """Compare what the plan writes with what is free, by disk."""
    size = plan.disk_gib
    asked = [sys.executable, "-m", "dvc", "cache", "dir"]
    cache = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or ".dvc/cache"
    needs = {
        "models, in HF_HOME": (Path(constants.HF_HOME), size["pipeline"] + size["rewards"]),
        "a run, here": (Path.cwd(), size["embeddings"] + size["trained"] + size["checkpoints"]),
        "its copies, in DVC's cache": (Path(cache), size["copies"]),
    }
    disks: dict[int, list[tuple[str, Path, float]]] = defaultdict(list)
    for what, (path, gib) in needs.items():
        there = next(
            folder for folder in [path.absolute(), *path.absolute().parents] if folder.exists()
        )
        disks[there.stat().st_dev].append((f"{what} {gib:.0f}", there, gib))
    for parts in disks.values():
        free, total = shutil.disk_usage(parts[0][1]).free / GIB, sum(gib for _, _, gib in parts)
        move = (
            ""
            if free >= total
            else "; make room, or move HF_HOME or DVC's cache (dvc cache dir --local DIR)"
        )
        yield Check(
            free >= total,
            f"disk of {parts[0][1]}: {free:.0f} GiB free, needs {total:.0f}: "
            f"{', '.join(part[0] for part in parts)}{move}",
        )


def _host(gpus: int, plan: Plan) -> Check:

    total = psutil.virtual_memory().total / GIB
    # The disk has two checkpoints, the host's memory one
    needed = gpus * OF_A_PROCESS + plan.disk_gib["checkpoints"] / 2
    return Check(
        total >= needed,
        f"host memory: {total:.0f} GiB, needs about {needed:.0f} for {gpus} processes and a "
        "checkpoint's copy",
    )


def _locks() -> Check:
    """Lock a file, as every run does."""
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        advice = (
            "mount it with flock, set dvc config --local core.hardlink_lock true, "
            "and start no run twice"
        )
        return Check(False, f"locks: this disk has none ({error.strerror}): {advice}")
    return Check(True, "locks: this disk has them")


def _address() -> Check:
    """Look up what other nodes would connect to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Check(False, f"address: {name} cannot be resolved ({error}): enter it in /etc/hosts")
    if address.startswith("127.") and not os.environ.get("GLOO_SOCKET_IFNAME"):
        advice = (
            "for several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface of "
            "`ip -brief address`"
        )
        return Check(
            True, f"address: {name} is {address}, which other nodes cannot reach: {advice}"
        )
    return Check(True, f"address: {name} is {address}")
