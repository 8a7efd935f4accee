"""Build the environment `.venv` that requirements.lock pins, or say that it is older; `make env` and `make check` start this.

`.venv` is a link to `.cache/environments/KEY`, where KEY is a hash of everything that decides what is installed. A new environment
is built in its own folder and the link is exchanged last, so the old one stays usable until the new one is complete.
Needs nothing but Python's standard library, because it runs before there is an environment.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python runs this line
    version = sys.version.split()[0]
    sys.exit(f"error: Python 3.11 or newer is needed, this is {version}; name another with: make PYTHON=python3.11")

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = ROOT / ".venv"
HOME = ROOT / ".cache" / "environments"
LOG = HOME / "build.log"
LOCKS = ("requirements.lock", "requirements-parity.lock")
# on all cores, where pip uses one; what cannot be compiled, such as a template, is left as it is
COMPILE = "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"
FITTINGS = ("tools/fit_torchvision.py", "tools/activate_environment.py")  # they write into the environment


class Failure(Exception):
    """An error that says in one line what is wrong and what to do."""


def main() -> None:
    """Run `build` or `check`, the first argument."""
    try:
        {"build": build, "check": check}[sys.argv[1]]()
    except (Failure, OSError) as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; `make env` starts again, and .venv is as it was")


def key() -> str:
    """Return the hash of the locks, the Python, what fits the environment, and the place of the checkout, which scripts hold."""
    parts = [platform.python_version().encode(), os.fsencode(ROOT)]
    parts += [(ROOT / name).read_bytes() for name in (*LOCKS, *FITTINGS)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def check() -> None:
    """Fail where there is no environment, warn where it is not the pinned one, and build nothing."""
    if not (LINK / "bin" / "python").exists():
        raise Failure("there is no environment; build it with: make env")
    folder = HOME / key()
    if LINK.resolve() != folder or not is_ready(folder) or not is_current(folder):
        print("warning: .venv is older than the pinned packages; bring it up to date with: make env", file=sys.stderr)


def build() -> None:
    """Build the pinned environment unless it is there, and point `.venv` at it; the one that it pointed at before is kept."""
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


def refuse_foreign() -> None:
    """Fail where `.venv` is a link or a folder that make has not made, because it is not ours to replace."""
    if LINK.is_symlink():
        if (ROOT / os.readlink(LINK)).parent != HOME:
            raise Failure(f".venv is a link to {os.readlink(LINK)}, which make did not make; remove the link, then: make env")
    elif LINK.exists() and not (LINK / "ready").exists():
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
    """Tell whether the package's own name, version, commands and dependencies are those that were installed."""
    return (folder / "ready").read_text() == package()


def package() -> str:
    """Return the part of pyproject.toml that an installation reads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return repr({name: project.get(name) for name in ("build-system", "project")})


def install(folder: Path) -> None:
    """Install everything at its pinned version.

    torch comes first, alone, so that pip chooses its release for this machine. Last come the published scorers that tests
    compare with: their own pins contradict each other, so they are installed without dependencies.
    """
    LOG.write_text("")
    run("a new environment", sys.executable, "-m", "venv", str(folder))
    torch = [line for line in (ROOT / LOCKS[0]).read_text().splitlines() if line.startswith("torch==")]
    if torch:
        pip(folder, torch[0], torch[0])
    pip(folder, "the pinned packages (some minutes)", "-r", LOCKS[0])
    pip(folder, "the published scorers", "--no-deps", "-r", LOCKS[1])
    for fitting in FITTINGS[0 if torch else 1 :]:
        run(fitting, str(folder / "bin" / "python"), fitting)
    run("bytecode", str(folder / "bin" / "python"), "-c", COMPILE)
    install_package(folder)


def install_package(folder: Path) -> None:
    """Install the checkout itself, as files that can be edited, and note that the folder is complete."""
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
            lines = [line.strip() for line in log if line.strip()]
            why = next((line for line in reversed(lines) if line.startswith(("ERROR", "OSError"))), (lines or ["no message"])[-1])
            raise Failure(
                f"{what} could not be installed ({why}); .venv is as it was; see {LOG.relative_to(ROOT)}, then: make env"
            )


def point_at(folder: Path) -> None:
    """Let `.venv` be a link to the folder, and remove all environments but this one and the one before."""
    before = LINK.resolve()
    if before == folder:
        return
    link = HOME / "link.new"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(ROOT))
    if LINK.is_symlink() or not LINK.exists():
        link.replace(LINK)
    else:  # a folder that an earlier Makefile made
        old = HOME / "old"
        shutil.rmtree(old, ignore_errors=True)
        LINK.rename(old)
        link.replace(LINK)
        shutil.rmtree(old)
    for other in HOME.iterdir():
        if other.is_dir() and other not in (folder, before):
            shutil.rmtree(other)


if __name__ == "__main__":
    main()
