"""`make env` in a small checkout with a package and a build backend of its own: no network."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import environment

pytestmark = pytest.mark.pipeline
PYTHON = f"PYTHON={sys._base_executable}"
TOOLS = ("__init__.py", "activate_environment.py", "environment.py", "fit_torchvision.py")
CORE = (
    "__init__.py",
    "foundation/__init__.py",
    "foundation/texts.py",
    "numerics/__init__.py",
    "numerics/driver.py",
)
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "checkout"
version = "{version}"
"""
BACKEND = """\
import tomllib
from wheels import write_wheel

def build_editable(folder, settings=None, metadata=None):
    version = tomllib.loads(open("pyproject.toml").read())["project"]["version"]
    return write_wheel(folder, "checkout", version)
"""
WHEELS = '''\
import base64, hashlib, zipfile
from pathlib import Path

def write_wheel(folder, name, version):
    """Write a wheel with one module that knows its version; return the file's name."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = __version__ = {version!r}\\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\n"
        "Root-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    def line(path, text):
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        digest = digest.rstrip(b"=").decode()
        return f"{path},sha256={digest},{len(text)}\\n"
    files[f"{info}/RECORD"] = "".join(line(*each) for each in files.items()) + f"{info}/RECORD,,\\n"
    with zipfile.ZipFile(Path(folder, f"{name}-{version}-py3-none-any.whl"), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl"
'''


class Checkout:
    """A checkout with the project's Makefile and tools, which pins the package `pinned`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.link = folder / ".venv"
        self.home = folder / ".cache" / "environments"
        (folder / "tools").mkdir(parents=True)
        for name in TOOLS:
            shutil.copy(ROOT / "tools" / name, folder / "tools")
        for name in CORE:
            (folder / "g2rpo_core" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "g2rpo_core" / name, folder / "g2rpo_core" / name)
        shutil.copy(ROOT / "Makefile", folder)
        (folder / "wheels.py").write_text(WHEELS)
        (folder / "backend.py").write_text(BACKEND)
        for name in environment.LOCKS:
            (folder / name).write_text("")
        (folder / "index").mkdir()
        for version in ("1.0", "2.0"):
            self.offer("pinned", version)
        self.pin("1.0")
        self.name("1.0")

    def offer(self, name: str, version: str) -> None:
        """Put a package into the index."""
        scope: dict = {}
        exec(WHEELS, scope)  # noqa: S102 - the text above
        scope["write_wheel"](self.folder / "index", name, version)

    def pin(self, version: str) -> None:
        self.lock("requirements.lock", f"pinned=={version}")

    def lock(self, name: str, *pins: str) -> None:
        """Write a lock with the hashes of the index; of what it has not, with a hash of nothing."""
        lines = []
        for pin in pins:
            package, version = pin.replace("===", "==").split("==")
            wheel = self.folder / "index" / f"{package}-{version}-py3-none-any.whl"
            data = wheel.read_bytes() if wheel.exists() else b""
            lines.append(f"{pin} \\\n    --hash=sha256:{hashlib.sha256(data).hexdigest()}\n")
        (self.folder / name).write_text("".join(lines))

    def name(self, version: str) -> None:
        (self.folder / "pyproject.toml").write_text(PROJECT.format(version=version))

    def start(self, target: str, *words: str) -> subprocess.Popen:
        chosen = ("TORCH", "PYTHON", "MAKEFLAGS")
        own = {name: value for name, value in os.environ.items() if name not in chosen}
        index = (self.folder / "index").as_uri()
        own |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": index, "PYTHONPATH": ""}
        command = ["make", "--no-print-directory", *(words or [PYTHON]), target]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=own, start_new_session=True, **pipes)

    def make(self, target: str, *words: str) -> tuple[int, str, list[str]]:
        """Return the exit status, what is printed, and the lines of error that are not make's own.

        words: variables of make, instead of this Python.
        """
        process = self.start(target, *words)
        out, error = process.communicate()
        lines = [line for line in error.splitlines() if not line.startswith("make: ")]
        return process.returncode, out, lines

    def installed(self, module: str) -> str:
        """Return the version that the environment's Python imports."""
        command = [self.link / "bin" / "python", "-c", f"import {module}; print({module}.version)"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd="/"
        ).stdout.strip()

    def environments(self) -> set[Path]:
        return (
            {path for path in self.home.iterdir() if path.is_dir()} if self.home.exists() else set()
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Checkout, list[str]]:
    """A checkout whose environment two makes build at once, and what they printed."""
    checkout = Checkout(tmp_path_factory.mktemp("checkout") / "with a space")
    both = [checkout.start("env") for _ in range(2)]
    printed = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    return checkout, [out for out, _ in printed]


def test_two_makes_at_once_build_one_environment(built):
    checkout, printed = built
    assert "".join(printed).count("environment: a new environment") == 1
    assert checkout.installed("pinned") == "1.0" and checkout.installed("checkout") == "1.0"


def test_nothing_is_installed_where_the_locks_are_the_same(built):
    checkout, _ = built
    os.utime(checkout.folder / "requirements.lock")
    assert checkout.make("env") == (0, "", []) and checkout.make("has-env") == (0, "", [])


def test_an_install_that_fails_leaves_the_environment_as_it_was(built):
    checkout, _ = built
    before = checkout.link.resolve()
    checkout.pin("9.9")
    status, _, error = checkout.make("env")
    assert status == 2 and len(error) == 1
    assert "No matching distribution found for pinned==9.9" in error[0] and error[0].endswith(
        "then: make env"
    )
    assert checkout.link.resolve() == before and checkout.environments() == {before}
    assert checkout.installed("pinned") == "1.0"


def test_a_killed_build_is_taken_up_and_the_one_before_is_kept(tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    assert checkout.make("env")[0] == 0
    first = checkout.link.resolve()
    checkout.pin("2.0")
    killed = checkout.start("env")
    while len(checkout.environments()) < 2:
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert checkout.link.resolve() == first and checkout.installed("pinned") == "1.0"
    assert checkout.make("env")[0] == 0
    second = checkout.link.resolve()
    assert checkout.installed("pinned") == "2.0" and checkout.environments() == {first, second}

    checkout.name("1.1")  # the package alone is installed again
    status, out, _ = checkout.make("env")
    assert (status, out) == (0, "environment: g2rpo\n") and checkout.installed("checkout") == "1.1"

    checkout.pin("1.0")  # the way back installs at most the package
    assert "a new environment" not in checkout.make("env")[1]
    assert checkout.installed("pinned") == "1.0" and checkout.link.resolve() == first


def test_a_venv_that_make_did_not_make_is_refused_and_left_alone(tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    checkout.link.symlink_to(tmp_path)
    status, out, error = checkout.make("env")
    assert (status, out) == (2, "") and len(error) == 1 and "then: make env" in error[0]
    assert checkout.link.resolve() == tmp_path and not checkout.environments()


def test_without_an_environment_a_target_that_reads_builds_none(tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    assert checkout.make("verify") == (
        2,
        "",
        ["error: there is no environment; build it with: make env"],
    )
    assert not checkout.link.exists() and not checkout.home.exists()


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory) -> Checkout:
    """A checkout that pins torch and torchvision.

    Its index has several builds of these, and torch's CPU build for one version alone.
    """
    checkout = Checkout(tmp_path_factory.mktemp("torch") / "checkout")
    for name in ("torch", "torchvision"):
        for build in ("", "+cpu", "+cu126"):
            checkout.offer(name, f"0.1{build}")
    checkout.offer("torch", "0.2")
    checkout.lock(environment.PYPI_TORCH, "torch===0.1", "torchvision===0.1")
    checkout.lock(environment.CPU_TORCH, "torch==0.1+cpu", "torchvision==0.1+cpu")
    return checkout


def test_a_build_that_does_not_exist_is_refused_and_not_replaced_by_another(with_torch):
    before = with_torch.link.resolve()
    status, _, error = with_torch.make("env", PYTHON, "TORCH=cu999")
    assert status == 2 and len(error) == 1 and "torch==0.1+cu999 could not be installed" in error[0]
    assert with_torch.link.resolve() == before
