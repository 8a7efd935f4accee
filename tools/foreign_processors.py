"""Compare what this machine computes with what emulated processors compute.

`make test-portable`, or with `--short` in CI.

A fixed probe runs natively and under QEMU's user mode, as processors of two vendors without
AVX-512: operations at the sizes of profile `tiny`, then two steps of every small model, their
embeddings, one GRPO iteration and one small evaluation, by the stages themselves. A third run
without portable numerics must differ. Nothing needs privileges: where QEMU is not installed,
Debian's package is unpacked into .cache/qemu.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ruamel.yaml import YAML

from g2rpo_core.config import load_profile
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.foundation.texts import reason
from g2rpo_core.hub.model_store import write_lock
from g2rpo_core.numerics import portable
from g2rpo_core.numerics.pins import PINS, are_set, read_processor
from g2rpo_core.numerics.probe import SMALL, TRUE, hash_operations
from g2rpo_core.tiny_models import clip, image_reward, unified_reward
from g2rpo_core.tiny_models.build import BUILDERS, build_pipeline, build_scorer, describe_models
from stages.entry import ends_in_one_line
from stages.versions import ROOT

QEMU = Path(".cache", "qemu")
# QEMU 7.2 has no AVX-512. Of these two, one is of another vendor than Intel, and each has caches of
# other sizes
PROCESSORS = ("EPYC", "Haswell")
FIT = {"steps": 2, "batch": 4}
PROBE_PROFILE = {
    "models": {
        "images": 64,
        **dict.fromkeys(
            ("vae", "flux", "clip_score", "hps", "pickscore", "image_reward", "unified_reward"), FIT
        ),
    },
    "prompts": {"train_count": 4, "test_count": 4},
    "sampling": {"steps": 6},
    "training": {"iterations": 1, "num_generations": 4, "monitor": {"every": 1, "prompts": 4}},
    "methods": {
        "g2rpo": {"settings": {"tree": {"sde_steps": [2]}}},
        "flow_grpo_fast": None,
    },  # its steps need more of sampling's
    "evaluation": {
        "steps": [6],
        "batch": 4,
        "diversity": None,
        "rewards": ["hps", "clip_score", "pickscore", "image_reward", "verifier"],
    },
}


@ends_in_one_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="small operations alone, on one emulated processor"
    )
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        probe(args.probe, args.short)
        return
    emulator = find_emulator()
    with tempfile.TemporaryDirectory() as folder:
        here = measure(Path(folder, "here.json"), args.short, [])
        print(f"here: {read_processor().get('model name', 'a processor')}, {len(here)} results")
        different = 0
        for name in PROCESSORS[:1] if args.short else PROCESSORS:
            start = time.time()
            there = measure(Path(folder, f"{name}.json"), args.short, [emulator, "-cpu", name])
            different += compare(name, here, there, time.time() - start)
        control = measure(Path(folder, "control.json"), args.short, [], portable=False)
        changed = [name for name in control if control[name] != here[name]]
        print(
            f"control, this processor without pins: {len(changed)} of {len(control)} different, "
            "as they should be"
        )
    if different or not changed:
        raise UserError(
            f"portable numerics: {different} results differ"
            if different
            else "portable numerics: the control is equal"
        )


def find_emulator() -> str:
    """Return the path of QEMU's x86-64 emulator; UserError if there is none."""
    for name in ("qemu-x86_64-static", "qemu-x86_64"):
        if path := shutil.which(name):
            return path
    found = QEMU / "usr" / "bin" / "qemu-x86_64-static"
    if not found.exists():
        QEMU.mkdir(parents=True, exist_ok=True)
        for command in ("apt-get download qemu-user-static", "dpkg -x qemu-user-static*.deb ."):
            done = subprocess.run(["bash", "-c", command], cwd=QEMU, capture_output=True, text=True)
            if done.returncode:
                raise UserError(
                    f"{command}: {reason(done.stderr)}: install QEMU's user mode, qemu-user-static"
                )
    return str(found.resolve())


def measure(out: Path, short: bool, before: list[str], portable: bool = True) -> dict[str, str]:
    """Run the probe in its own process; UserError with its last words if it fails.

    before: the emulator and its options.
    """
    environment = {name: value for name, value in os.environ.items() if name not in PINS} | (
        PINS if portable else {}
    )
    command = [
        *before,
        sys.executable,
        "-m",
        "tools.foreign_processors",
        "--probe",
        str(out),
        *(["--short"] if short else []),
    ]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(
            f"{' '.join(before) or 'here'}: the probe ended with status {done.returncode}: "
            f"{done.stderr.strip()[-300:]}"
        )
    return json.loads(out.read_text())


def compare(name: str, here: dict[str, str], there: dict[str, str], seconds: float) -> int:
    """Print how many results of an emulated processor differ, and which; return their number."""
    different = [key for key in here if there.get(key) != here[key]]
    print(
        f"{name}, emulated: {len(here) - len(different)} equal, "
        f"{len(different)} different ({seconds:.0f} s)"
    )
    for key in different:
        print(f"  different: {key}")
    return len(different)


def probe(out: Path, short: bool) -> None:
    """Compute here, in this process, and write the hash of every result."""
    if are_set():
        portable.use("portable")
    found = hash_operations(SMALL if short else TRUE)
    if not short:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found |= run_stages()
    out.write_text(json.dumps(found))


def run_stages() -> dict[str, str]:
    """Run the stages on small settings in the working directory; return their files' SHA-256.

    All in this process: what an emulated one starts would run on the real processor.
    """
    settings = load_profile(write_profile()).models
    Path("params.yaml").write_text("profile: probe\nmethods: [g2rpo]\nseeds: [1]\n")
    # The models: drawing the scorers' thousands of scenes would take most of the time
    fewer = lambda task, count, seed, *, testing, pairs=clip.pairs: pairs(
        task, min(count, 64), seed, testing=testing
    )
    clip.pairs = image_reward.pairs = fewer
    unified_reward.SCENES = 64
    root = Path("models", "probe")
    quality = build_pipeline(root, settings)
    for name in filter(settings.fit_of, BUILDERS):
        quality |= build_scorer(root, settings, name)
    write_lock(root, describe_models(root))
    # The stages after them
    for stage, *words in (
        ("prompts",),
        ("embed",),
        ("train", "--method", "g2rpo", "--seed", "1"),
        ("evaluate", "--method", "g2rpo", "--seed", "1"),
    ):
        sys.argv = [stage, "--profile", "probe", *words]
        runpy.run_module(f"stages.{stage}", run_name="__main__")
    kept = [
        file
        for name in ("models", "prompts", "embeddings", "runs", "evaluations")
        for file in sorted(Path(name).rglob("*"))
        if file.is_file()
    ]
    found = {str(file): sha256(file) for file in kept}
    return found | {f"quality of {name}": repr(value) for name, value in quality.items()}


def write_profile() -> Path:
    """Write the probe's profile into the working directory; return its path.

    It has few and small steps; the control has no pins.
    """
    Path("profiles").mkdir()
    shutil.copy(ROOT / "profiles" / "tiny.yaml", "profiles")
    numerics = "portable" if are_set() else "native"
    YAML().dump(
        {"extends": "tiny", "numerics": numerics, **PROBE_PROFILE},
        path := Path("profiles", "probe.yaml"),
    )
    return path


if __name__ == "__main__":
    main()
