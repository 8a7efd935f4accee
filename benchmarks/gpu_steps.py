"""Do one step of `benchmarks.gpu_hour`; its result is a JSON object on the last line.

    python -m benchmarks.gpu_steps card|compiled|base|scores|run|kernels ... --home FOLDER [--size
    tiny --device cpu]

card: a training on the GPU and on the CPU; base K: the models of profile small_gpu with seed K;
scores K: the scores of that base; run K METHOD: a training on it, and its scores; compiled: what
fills the cache of compiled code; kernels: gradients by attention backend, quantized weights,
decoding and scoring.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_hour import ROOT, environment, last_line
from g2rpo_core.hub.model_store import QUALITY

PROFILES = {"flux": "small_gpu", "tiny": "small_gpu_check"}  # size -> the profile that is built
SEED = "1"  # of every run
CARD_ITERATIONS = 4


def python(module: str, *words: str, **how: Any) -> str:
    """Run a module and return its last line; RuntimeError with its last error line if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, **how
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(words)}: {last_line(done.stderr)}")
    return last_line(done.stdout)


def stage(home: Path, name: str, *words: str, device: str = "cuda") -> float:
    """Run a stage in the checkout `home` and return its seconds.

    RuntimeError with its last line if it fails.
    """
    env = environment() | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    start = time.monotonic()
    python(f"stages.{name}", *words, cwd=home, env=env)
    return round(time.monotonic() - start, 1)


def checkout(home: Path, name: str, profile: dict) -> str:
    """Make `home` a folder in which stages run, with this profile; return the profile's name."""
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
    """Return a run's mean scores, held-out curve, and seconds after each iteration."""
    reports = home / "reports" / "others" / profile
    files = {
        "scores": reports / "metrics" / f"{run}.json",
        "curve": home / "runs" / profile / run / "curve.json",
        "timings": reports / "timings" / f"{run}.json",
    }
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def card(home: Path, size: str, device: str) -> dict:
    """Train G²RPO in float32 on both devices, from the same models.

    Returns every figure of every iteration, and scores at the end.
    """
    sections = {
        "models": {"device": "cpu"},
        "sampling": {"dtype": "float32"},
        "training": {"iterations": CARD_ITERATIONS, "learning_rate": 1e-4},
    }
    names = [
        checkout(home, f"card_{where}", {"extends": "small_gpu_check", **sections})
        for where in ("cpu", "card")
    ]
    for each in ("models", "prompts", "embed"):
        stage(home, each, "--profile", names[0], device="cpu")
    for part in ("models", "prompts", "embeddings"):
        (home / part / names[1]).unlink(missing_ok=True)
        (home / part / names[1]).symlink_to(names[0])
    result = {}
    for name, where in zip(names, ("cpu", device)):
        words = ("--profile", name, "--method", "g2rpo", "--seed", SEED)
        seconds = {each: stage(home, each, *words, device=where) for each in ("train", "evaluate")}
        result[name] = {
            "seconds": seconds,
            **made(home, name, f"g2rpo-{SEED}"),
            "records": records(home, name, f"g2rpo-{SEED}"),
        }
    return result


def records(home: Path, profile: str, run: str) -> list[dict]:
    """Return the records of a run's iterations."""
    import pandas as pd

    table = pd.read_parquet(home / "runs" / profile / run / "records.parquet")
    return json.loads(table.to_json(orient="records"))


def base(home: Path, size: str, device: str, seed: str) -> dict:
    """Build the models of profile small_gpu with a seed, and encode its prompts."""
    name = checkout(
        home, f"small_{seed}", {"extends": PROFILES[size], "models": {"seed": int(seed)}}
    )
    with ThreadPoolExecutor(2) as pool:  # the prompts need no models
        jobs = {
            each: pool.submit(stage, home, each, "--profile", name, device=device)
            for each in ("models", "prompts")
        }
        seconds = {each: job.result() for each, job in jobs.items()}
    seconds["embed"] = stage(home, "embed", "--profile", name, device=device)
    return {
        "seconds": seconds,
        "quality": json.loads((home / "models" / name / QUALITY).read_text()),
    }


def scores(home: Path, size: str, device: str, seed: str) -> dict:
    """Score the images of a base."""
    seconds = stage(
        home,
        "evaluate",
        "--profile",
        f"small_{seed}",
        "--method",
        "base",
        "--seed",
        "0",
        device=device,
    )
    return {"seconds": {"evaluate": seconds}, **made(home, f"small_{seed}", "base-0")}


def compiled(home: Path, size: str, device: str) -> dict:
    """Train each method for two iterations, which fills the cache of compiled code.

    The model has small_gpu's shape and is hardly trained.
    """
    few = {"steps": 5}
    models = {
        "images": 256,
        **dict.fromkeys(("vae", "flux", "hps", "clip_score", "pickscore"), few),
    }
    training = {"iterations": 2, "monitor": {"every": 2}}
    entries = {"nft_shared_compute": {"training": {"iterations": 2}}}  # it has a number of its own
    name = checkout(
        home,
        "compiled",
        {"extends": PROFILES[size], "models": models, "training": training, "methods": entries},
    )
    for each in ("models", "prompts", "embed"):
        stage(home, each, "--profile", name, device=device)
    result = {}
    for method in ("g2rpo", "mix_grpo", "dance_grpo", "nft_shared_compute"):
        seconds = stage(
            home, "train", "--profile", name, "--method", method, "--seed", SEED, device=device
        )
        result[method] = {
            "stage": seconds,
            "iterations": made(home, name, f"{method}-{SEED}")["timings"]["seconds"],
        }
    return result


def run(home: Path, size: str, device: str, seed: str, method: str) -> dict:
    """Train a method on the base of that seed, and score its images."""
    name = f"small_{seed}"
    words = ("--profile", name, "--method", method, "--seed", SEED)
    # A call that was stopped in the evaluation has left the training
    trained = (home / "runs" / name / f"{method}-{SEED}" / "records.parquet").exists()
    seconds = {
        each: stage(home, each, *words, device=device) for each in ("train", "evaluate")[trained:]
    }
    rows = records(home, name, f"{method}-{SEED}")
    kept = (
        "iteration",
        "num_forward_evals",
        "num_transitions",
        "old_policy_ratio_error",
        "loss",
        "grad_norm",
    )
    few = [{key: row.get(key) for key in kept} for row in (rows[1], rows[-1])]
    return {"seconds": seconds, "records": few, **made(home, name, f"{method}-{SEED}")}


def kernels(home: Path, size: str, device: str) -> dict:
    """Measure attention backends with gradients, then all that needs no process of its own.

    Some backends end their process.
    """
    measure = lambda *what: json.loads(
        python("benchmarks.gpu_kernels", *what, "--size", size, "--device", device)
    )
    attention = {}
    for backend in (
        ("math", "flash", "efficient", "cudnn") if device == "cuda" else ("math", "flash")
    ):
        try:
            attention[backend] = measure("attention", backend)
        except RuntimeError as error:
            attention[backend] = {"error": str(error)}
    return {"attention": attention, **measure("others")}


STEPS: dict[str, Callable[..., dict]] = {
    "card": card,
    "base": base,
    "scores": scores,
    "compiled": compiled,
    "run": run,
    "kernels": kernels,
}


def main() -> None:
    """Parse the options, do the step, and print its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("words", nargs="*", help="seed of the base, and method")
    parser.add_argument("--home", type=Path, required=True, help="folder in which stages run")
    parser.add_argument("--size", choices=PROFILES, default="flux")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--json", action="store_true", help="as the other benchmarks; the result is always JSON"
    )
    args = parser.parse_args()
    args.home.mkdir(parents=True, exist_ok=True)
    print(json.dumps(STEPS[args.step](args.home.resolve(), args.size, args.device, *args.words)))


if __name__ == "__main__":
    main()
