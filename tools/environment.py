"""Build the environment `.venv` that requirements*.lock pin, or say that it is older.

`make env` and `make check` start this; the Dockerfile has `install` fill a folder of its own. Each
file that pip takes must have a hash of its lock. The exception is a build of torch that has no
lock (`locked`): pip compares it with the hash that PyTorch's index publishes.

`.venv` is a link to `.cache/environments/KEY`, where KEY is a hash of everything that decides what
is installed. A new environment is built in its own folder and the link is exchanged last, so the
old one stays usable until the new one is complete. The build of torch is a choice: the environment
variable TORCH, which `make` sets from `make env TORCH=…`; see `choose_torch`. Needs nothing but
Python's standard library, because it runs before there is an environment.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python runs this line
    version = sys.version.split()[0]
    sys.exit(
        f"error: Python 3.11 or newer is needed, this is {version}; name another with: "
        "make PYTHON=python3.11"
    )

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from g2rpo_core.foundation.texts import reason
from g2rpo_core.numerics import driver

ROOT = Path(__file__).resolve().parent.parent
LINK = ROOT / ".venv"
HOME = ROOT / ".cache" / "environments"
LOG = HOME / "build.log"
CHOICE = HOME / "choice.mk"
LOCK = "requirements.lock"
BUILD_LOCK = "requirements-build.lock"  # what builds a package that has no wheel
PYPI_TORCH = "requirements-torch.lock"  # torch as PyPI has it, with CUDA's libraries
CPU_TORCH = "requirements-torch-cpu.lock"  # from PyTorch's own index
PARITY_LOCK = "requirements-parity.lock"
LOCKS = (LOCK, BUILD_LOCK, PYPI_TORCH, CPU_TORCH, PARITY_LOCK)
# PyTorch's own index, which has its builds: cpu, cu126, cu130, …
TORCH_INDEX = "https://download.pytorch.org/whl/{build}"
ANSWERS_WITHIN = 10  # seconds
# on all cores, where pip uses one; what cannot be compiled, such as a template, is left as it is
COMPILE = (
    "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, "
    "workers=0)"
)
FITTINGS = (
    "tools/fit_torchvision.py",
    "tools/activate_environment.py",
)  # they write into the environment


class Failure(Exception):
    """An error that says in one line what is wrong and what to do."""


class WrongHash(Failure):
    """A file is not the one that the lock names; no other source takes its place."""


def main() -> None:
    """Run `build`, `check` or `install FOLDER`, the arguments."""
    try:
        if sys.argv[1] == "install":
            HOME.mkdir(parents=True, exist_ok=True)
            LOG.write_text("")
            install_packages(Path(sys.argv[2]))
        else:
            {"build": build, "check": check}[sys.argv[1]]()
    except (Failure, OSError) as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; `make env` starts again, and .venv is as it was")


def key() -> str:
    """Hash what decides an environment: locks, Python, torch's build, fitting code, path.

    Scripts hold the checkout's path.
    """
    parts = [platform.python_version().encode(), os.fsencode(ROOT), repr(choose_torch()).encode()]
    parts += [(ROOT / name).read_bytes() for name in (*LOCKS, *FITTINGS)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def check() -> None:
    """Fail without an environment, and warn if it is not the pinned one; build nothing."""
    if not (LINK / "bin" / "python").exists():
        raise Failure("there is no environment; build it with: make env")
    folder = HOME / key()
    if LINK.resolve() != folder or not is_ready(folder) or not is_current(folder):
        print(
            "warning: .venv is older than the pinned packages; bring it up to date with: make env",
            file=sys.stderr,
        )


def build() -> None:
    """Build the pinned environment unless it exists, and point `.venv` at it.

    The one that it pointed at before is kept.
    """
    refuse_foreign()
    HOME.mkdir(parents=True, exist_ok=True)
    with alone():
        folder = HOME / key()
        if not is_ready(folder):
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted build left
            try:
                install(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        elif not is_current(folder):
            install_package(folder)
        point_at(folder)
        remember()


class Torch(NamedTuple):
    """A build of torch to install."""

    build: str
    """What follows the + of torch's version, such as cpu or cu126; or `pip`.

    `pip`: the build that pip finds by itself.
    """
    must: bool
    """Whether no other build will do."""


def choose_torch() -> Torch:
    """Return the build that TORCH names, or by default the newest that the driver runs.

    Without a driver that is the CPU build, which has half the size; where no index has it, any
    build works. Failure for another word.
    """
    asked = os.environ.get("TORCH") or "auto"
    if not re.fullmatch("auto|pip|cpu|cu[0-9]+", asked):
        raise Failure(
            f"TORCH={asked}: write auto, cpu, cu126 or another of PyTorch's builds, "
            "or pip for the one that pip finds"
        )
    if asked != "auto":
        return Torch(asked, must=True)
    if sys.platform != "linux":
        return Torch("pip", must=True)
    build = driver.fitting_build(driver.find_version())
    return Torch(build, must=build != "cpu")


def remember() -> None:
    """Let the next `make` take the same Python and build of torch, unless it is told others."""
    python, torch = os.environ.get("PYTHON"), os.environ.get("TORCH")
    if python and torch:
        escaped = python.replace("$", "$$").replace("#", "\\#")
        lines = [
            f"ifneq ($(shell command -v '{escaped}'),)",
            f"PYTHON ?= {escaped}",
            "endif",
            f"TORCH ?= {torch}",
        ]
        text = "\n".join(["# what `make env` was last told", *lines, ""])
        if not CHOICE.exists() or CHOICE.read_text() != text:
            CHOICE.write_text(text)


def refuse_foreign() -> None:
    """Fail if make has not made `.venv`: it is not ours to replace."""
    made = LINK.is_symlink() and (ROOT / os.readlink(LINK)).parent == HOME
    if not made and (LINK.is_symlink() or LINK.exists()):
        raise Failure(".venv was not made by make; move it away (mv .venv my-venv), then: make env")


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other make builds or cleans; the lock goes with the process that holds it."""
    with (HOME / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("environment: waiting for another make", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_ready(folder: Path) -> bool:
    """Tell whether the folder is complete and its Python still exists."""
    return (folder / "ready").exists() and (folder / "bin" / "python").exists()


def is_current(folder: Path) -> bool:
    """Tell whether the installed package has this name, version, commands and dependencies."""
    return (folder / "ready").read_text() == package()


def package() -> str:
    """Return the part of pyproject.toml that an installation reads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return repr({name: project.get(name) for name in ("build-system", "project")})


def install(folder: Path) -> None:
    """Install everything at its pinned version.

    Last come the published scorers that tests compare with: their own pins contradict each other.
    """
    LOG.write_text("")
    run("a new environment", sys.executable, "-m", "venv", str(folder))
    install_packages(folder)
    pip(folder, "the published scorers", *checked(PARITY_LOCK))
    run("bytecode", str(folder / "bin" / "python"), "-c", COMPILE)
    install_package(folder)


def install_packages(folder: Path) -> None:
    """Install into an environment what the package needs, and torch in the chosen build."""
    pip(folder, "what builds packages", *checked(BUILD_LOCK))
    # The locked backend builds what has no wheel: pip would fetch one that nobody has pinned, and
    # before 23.1 runs setup.py, which leaves no list of the package's files
    built = ("--no-build-isolation", "--use-pep517")
    pip(folder, "the pinned packages (some minutes)", *built, *checked(LOCK))
    pins = re.findall(
        r"^(torch|torchvision)===([^\s\\]+)", (ROOT / PYPI_TORCH).read_text(), re.MULTILINE
    )
    if pins:
        install_torch(folder, dict(pins))
    # Nothing asked for what a package needs: each lock must have all of it
    run("what the packages need", str(folder / "bin" / "python"), "-m", "pip", "check")
    for fitting in FITTINGS[0 if pins else 1 :]:
        run(fitting, str(folder / "bin" / "python"), fitting)


def checked(lock: str) -> tuple[str, ...]:
    """Return pip's words for all of a lock and nothing else, with each file's hash compared."""
    return ("--no-deps", "--require-hashes", "-r", lock)


def install_torch(folder: Path, pins: dict[str, str]) -> None:
    """Install torch and torchvision in the chosen build; pins: their versions."""
    build, must = choose_torch()
    what = f"torch=={pins['torch']}{'' if build == 'pip' else f'+{build}'}"
    left = list(sources(pins, build, must))
    while left:
        words = left.pop(0)
        try:
            pip(folder, what, *words)
            break
        except WrongHash:
            raise
        except Failure:
            if not left:
                raise
    # Say which build it is
    python = [str(folder / "bin" / "python"), "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(python, capture_output=True, text=True, check=True).stdout.strip()
    if must and build not in ("pip", locked()) and not version.endswith(f"+{build}"):
        raise Failure(f"TORCH={build}: pip installed torch {version} instead; .venv is as it was")
    more = (
        ", because no index has the CPU build for this Python: 3 GB more"
        if build == "cpu" and "+cu" in version
        else ""
    )
    print(f"environment: that is torch {version}{more}", flush=True)


def sources(pins: dict[str, str], build: str, must: bool) -> Iterator[tuple[str, ...]]:
    """Yield pip's words for a build of torch, to try in turn.

    Where another build will do, an index that does not answer is left out, because pip would wait
    for it for minutes.
    """
    url = TORCH_INDEX.format(build=build)
    index = ("--extra-index-url", url)
    if build in ("pip", locked()):
        yield checked(PYPI_TORCH)
    elif build == "cpu":
        yield (*checked(CPU_TORCH), *(index if must or answers(url) else ()))
    else:
        print(f"environment: no lock has torch+{build}; the hashes are those of {url}", flush=True)
        yield (f"torch=={pins['torch']}+{build}", f"torchvision=={pins['torchvision']}", *index)
    if not must:
        yield checked(PYPI_TORCH)


def locked() -> str | None:
    """Return the build that PyPI has for this machine, which PYPI_TORCH locks, if it has a name."""
    return driver.FROM_PYPI if platform.machine() == "x86_64" else None


def answers(index: str) -> bool:
    """Tell whether an index of packages answers; none is asked if pip may ask none."""
    if os.environ.get("PIP_NO_INDEX"):
        return False
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=ANSWERS_WITHIN):
            return True
    except (OSError, ValueError):
        return False


def install_package(folder: Path) -> None:
    """Install the checkout in editable form, and note that the folder is complete."""
    pip(folder, "g2rpo", "--no-deps", "--no-build-isolation", "-e", ".")
    ready = folder / "ready.new"
    ready.write_text(package())
    ready.rename(folder / "ready")


def pip(folder: Path, what: str, *words: str) -> None:
    """Install by the folder's own pip, which leaves the bytecode to be compiled later."""
    quiet = ("--quiet", "--no-compile", "--disable-pip-version-check")
    run(what, str(folder / "bin" / "python"), "-m", "pip", "install", *quiet, *words)


def run(what: str, *command: str) -> None:
    """Run a command with its output in the log; fail with its last line of error."""
    print(f"environment: {what}", flush=True)
    with LOG.open("a+") as log:
        start = log.tell()
        if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode:
            log.seek(start)
            said = log.read()
            other = re.search(r"DO NOT MATCH THE HASHES.*\n\s*(\S+)", said)
            if other:  # pip's own line names no package
                why = f"{other[1]} is not the file whose hash the lock has: was it changed?"
            else:
                why = reason(said)
            raise (WrongHash if other else Failure)(
                f"{what} could not be installed ({why}); .venv is as it was; "
                f"see {LOG.relative_to(ROOT)}, then: make env"
            )


def point_at(folder: Path) -> None:
    """Link `.venv` to the folder, and remove all environments but this and the previous one."""
    before = LINK.resolve()
    if before == folder:
        return
    link = HOME / "link.new"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(ROOT))
    link.replace(LINK)
    for other in HOME.iterdir():
        if other.is_dir() and other not in (folder, before):
            shutil.rmtree(other)


if __name__ == "__main__":
    main()
