"""Do one step of `benchmarks.gpu_hour`; its result is a JSON object on the last line.

    python -m benchmarks.gpu_steps card|base|run|kernels ... --home FOLDER [--size tiny --device cpu]

card: a training of profile tiny on the GPU and on the CPU; base K: the models of profile small_gpu with seed K, and their scores; run K METHOD:
a training on that base, and its scores; kernels: gradients by attention backend, quantized weights, decoding and scoring.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROFILES = {"flux": "small_gpu", "tiny": "small_gpu_check"}  # size -> the profile that is built
SEED = "1"  # of every run
CARD_ITERATIONS = 4  # of G²RPO on the CPU, seconds each


def stage(home: Path, name: str, *words: str, device: str = "cuda") -> float:
    """Run a stage in the checkout `home`, and return its seconds; RuntimeError with its last line if it fails."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", f"stages.{name}", *words], cwd=home, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"stage {name} {' '.join(words)}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return round(time.monotonic() - start, 1)


def checkout(home: Path, name: str, profile: dict) -> str:
    """Make the folder `home` one in which stages run, with this profile in it; return the profile's name."""
    folder = home / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (ROOT / "profiles").glob("*.yaml"):
        if not (folder / file.name).exists():
            try:
                (folder / file.name).symlink_to(file)
            except FileExistsError:  # by a step beside this one
                pass
    # what has no profile in its path is then below reports/others
    (home / "params.yaml").write_text("profile: tiny\nmethods: [g2rpo]\nseeds: [1]\n")
    (folder / f"{name}.yaml").write_text(json.dumps(profile))
    return name


def made(home: Path, profile: str, run: str) -> dict:
    """Return what stages have made of a run: mean scores, the held-out curve, and seconds after each iteration."""
    reports = home / "reports" / "others" / profile
    files = {"scores": reports / "metrics" / f"{run}.json", "curve": reports / "curves" / f"{run}.json", "timings": reports / "timings" / f"{run}.json"}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def card(home: Path, size: str, device: str) -> dict:
    """Train G²RPO of profile tiny on both devices: how far scores of the first iteration and held-out ones are apart, and the seconds.

    Uses the models of this checkout if they are there; otherwise those of small_gpu_check.
    """
    built = (ROOT / "models" / "tiny" / "models.lock.json").exists() and size == "flux"
    monitor = {"every": CARD_ITERATIONS, "prompts": 64, "rewards": ["hps", "clip_score", "verifier"]}
    training = {"iterations": CARD_ITERATIONS, "monitor": monitor, "lr_scheduler": "constant"} if built else {}
    result: dict = {"models": "tiny" if built else "small_gpu_check"}
    for where in dict.fromkeys((device, "cpu")):
        name = checkout(home, f"card_{where}", {"extends": result["models"], "training": training})
        for part in ("models", "prompts", "embeddings") if built else ():
            (home / part).mkdir(exist_ok=True)
            if not (home / part / name).exists():
                (home / part / name).symlink_to(ROOT / part / "tiny")
        for each in () if built else ("models", "prompts", "embed"):
            stage(home, each, "--profile", name, device=where)
        words = ("--profile", name, "--method", "g2rpo", "--seed", SEED)
        result[where] = {"train": stage(home, "train", *words, device=where), "evaluate": stage(home, "evaluate", *words, device=where)}
        result[where] |= made(home, name, f"g2rpo-{SEED}") | {"records": records(home, name, f"g2rpo-{SEED}")}
    return result


def records(home: Path, profile: str, run: str) -> list[dict]:
    """Return the records of a run's iterations."""
    import pandas as pd

    table = pd.read_parquet(home / "runs" / profile / run / "records.parquet")
    return json.loads(table.to_json(orient="records"))


def base(home: Path, size: str, device: str, seed: str) -> dict:
    """Build the models of profile small_gpu with a seed, encode its prompts, and score the base's images."""
    name = checkout(home, f"small_{seed}", {"extends": PROFILES[size], "models": {"seed": int(seed)}})
    seconds = {each: stage(home, each, "--profile", name, device=device) for each in ("models", "prompts", "embed")}
    seconds["evaluate"] = stage(home, "evaluate", "--profile", name, "--method", "base", "--seed", "0", device=device)
    quality = json.loads((home / "reports" / "others" / name / "models.json").read_text())
    return {"seconds": seconds, "quality": quality, **made(home, name, "base-0")}


def run(home: Path, size: str, device: str, seed: str, method: str) -> dict:
    """Train a method on the base of that seed, and score its images."""
    name = f"small_{seed}"
    words = ("--profile", name, "--method", method, "--seed", SEED)
    seconds = {each: stage(home, each, *words, device=device) for each in ("train", "evaluate")}
    rows = records(home, name, f"{method}-{SEED}")
    kept = ("iteration", "num_forward_evals", "num_transitions", "old_policy_ratio_error", "loss", "grad_norm")
    few = [{key: row.get(key) for key in kept} for row in (rows[1], rows[-1])]
    return {"seconds": seconds, "records": few, **made(home, name, f"{method}-{SEED}")}


def kernels(home: Path, size: str, device: str) -> dict:
    """Measure attention backends with gradients, each in a process of its own because some end it; then what needs no such care."""
    backends = ("math", "flash", "efficient", "cudnn") if device == "cuda" else ("math", "flash")
    result: dict = {"attention": {}}
    for backend in backends:
        words = ("benchmarks.gpu_kernels", "attention", backend, "--size", size, "--device", device)
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        last = ((done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"])[-1]
        result["attention"][backend] = json.loads(last) if done.returncode == 0 else {"error": last}
    words = ("benchmarks.gpu_kernels", "others", "--size", size, "--device", device)
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return result | json.loads(done.stdout.strip().splitlines()[-1])


STEPS: dict[str, Callable[..., dict]] = {"card": card, "base": base, "run": run, "kernels": kernels}


def main() -> None:
    """Parse the options, do the step, and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("words", nargs="*", help="seed of the base, and method")
    parser.add_argument("--home", type=Path, required=True, help="folder in which stages run")
    parser.add_argument("--size", choices=PROFILES, default="flux")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", action="store_true", help="as the other benchmarks; the result is always JSON")
    args = parser.parse_args()
    args.home.mkdir(parents=True, exist_ok=True)
    print(json.dumps(STEPS[args.step](args.home.resolve(), args.size, args.device, *args.words)))


if __name__ == "__main__":
    main()
