"""Vouch for changed code whose bits are those of the code before it; `make vouch` starts this.

Runs a small pipeline through every stage, base model and kind of method, compares what each stage
writes with the hashes in stages/versions.yaml, and gives code with the same bits the same version.

    make vouch                  equal bits, and every changed function ran
    make vouch NEW="train"      other bits are meant: a new version of these stages
    make vouch UNTRIED=1        equal, and other tests vouch for what changed and did not run
    make vouch BASELINE=1       the same code has other bits, by other profiles or packages
"""

import ast
import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType

from ruamel.yaml import YAML

from stages.versions import ROOT, STAGES, VOUCHED, Deciding, files_of, hash_of, told

HEAD = """\
# Written by `make vouch`. Of a stage: the hash of its code; version: that of the first code with
# the same bits; outputs: of what the small pipeline of tools/vouch.py writes.
"""
BASES = ("flux", "sd3", "flux2", "qwen_image", "zimage")
NEEDS = {  # stage -> those whose outputs decide its own
    "embed": {"models", "prompts"},
    "train": {"models", "prompts", "embed"},
    "evaluate": {"models", "prompts", "embed", "train"},
    "published": {"models", "prompts", "embed", "train"},
    "report": set(STAGES),
    "profile": set(STAGES),  # their settings' defaults
}
OUTPUTS = {
    "models": ("models",),
    "prompts": ("prompts",),
    "embed": ("embeddings",),
    "train": ("runs",),
    "evaluate": ("evaluations", "reports/metrics"),
    "published": ("published",),
    "report": tuple(f"reports/{name}" for name in ("report.md", "report.html", "report.json")),
}
# Methods by base; the first base's are also evaluated and reported
METHODS = {
    "flux": ("g2rpo", "flow_grpo_fast", "lora"),
    "sd3": ("dance_grpo", "ram"),
    "flux2": ("diffusion_nft",),
    "qwen_image": ("awm",),
    "zimage": ("rvm",),
}
TREES = (
    "g2rpo",
    "g2rpo_no_mgai",
    "g2rpo_coarse",
    "flow_grpo_fast",
    "nft_leaves",
)  # with steps to set
RESOLVED = (
    "tiny_verdict",
    "tiny_zimage",
    "flux_hps_clip",
    "flux_lora_24gb",
    "sd35_medium_hps_clip",
)
SCORERS = {"flux": ("hps",), "sd3": ("clip_score",)}  # by the part that builds them
CONSTANTS, IMPORT = "<constants>", "import "
FIT = {"steps": 2, "batch": 4, "learning_rate": 1e-3}
LONGER = {"steps": 6, "batch": 8, "learning_rate": 1e-2}  # until all blocks have gradients


def main(new: list[str], untried: bool, baseline: bool) -> None:
    table = YAML(typ="safe").load(VOUCHED.read_text())
    hashes = {stage: hash_of(stage) for stage in STAGES}
    changed = [stage for stage in STAGES if table.get(stage, {}).get("code") != hashes[stage]]
    if unknown := set(new) - set(STAGES):
        sys.exit(f"NEW: no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if baseline and (changed or new):
        sys.exit(f"BASELINE: vouch for code first: {', '.join(changed or new)}")
    if not (changed or new or baseline):
        print("the code of every stage is vouched for")
        return
    outputs, ran = run_parts()
    problems = []
    for stage in STAGES:
        known = table.get(stage, {})
        same = baseline or known.get("outputs", outputs[stage]) == outputs[stage]
        if stage in new or not known:
            table[stage] = known = {"version": hashes[stage]}
        elif not same and stage in changed:
            problems.append(f"{stage}: other bits than before; if that is meant: NEW={stage!r}")
        elif not same and not NEEDS.get(stage, set()) & set(new):
            problems.append(f"{stage}: other bits by the same code: BASELINE, if profiles changed")
        elif stage in changed and not untried:
            left = sorted(set(changed_parts(stage)) - ran)
            problems += [
                f"{stage}: {name} in {file} changed and did not run" for file, name in left
            ]
        known |= {"code": hashes[stage], "outputs": outputs[stage]}
    if problems:
        sys.exit("\n".join([*dict.fromkeys(problems), "nothing is vouched for"]))
    with VOUCHED.open("w") as file:
        file.write(HEAD)
        YAML().dump({stage: table[stage] for stage in STAGES}, file)
    print(f"vouched for: {', '.join(changed or new or ['the outputs'])}")


def changed_parts(stage: str) -> Iterator[tuple[str, str]]:
    """Yield file and name of what a stage has and the last vouched commit had not.

    Also of methods that are gone: what they overrode takes their place.
    """
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    since = git("log", "-1", "--format=%H", "--", str(VOUCHED)).stdout.strip()
    if not since:
        sys.exit(f"git knows no commit of {VOUCHED.name}, so what changed is not known")
    for path in files_of(stage):
        file, text = str(path.relative_to(ROOT)), path.read_text()
        before = git("show", f"{since}:{file}").stdout
        if path.suffix != ".py":
            yield from [(file, "the file")] if before != text else []
            continue
        known, now = dict(parts(before)), dict(parts(text))
        gone = {name for name in known.keys() - now.keys() if "." in name and IMPORT not in name}
        other = {name for name in now if known.get(name) != now[name]}
        added = {name for name in now.keys() - known.keys() if IMPORT in name}
        yield from ((file, name) for name in gone | other - added)


def parts(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each function, as in its code object, and the syntax that decides.

    Also of each imported name where it is from, and of what else is around functions, CONSTANTS:
    that these run does not say that something uses them.
    """
    todo: list[tuple[str, ast.AST]] = [("", Deciding().visit(ast.parse(source)))]
    while todo:
        inside, parent = todo.pop()
        around = []
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{inside}{node.name}", told(node)
                todo.append((f"{inside}{node.name}.<locals>.", node))
            elif isinstance(node, ast.ClassDef):
                todo.append((f"{inside}{node.name}.", node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                where = getattr(node, "module", None)
                for alias in node.names:
                    yield f"{IMPORT}{alias.asname or alias.name}", f"{where} {alias.name}"
            else:
                around.append(node)
        if not isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{inside}{CONSTANTS}", told(around)


def run_parts() -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Run the small pipeline; return the hash of each stage's outputs, and what functions ran."""
    with tempfile.TemporaryDirectory() as folder:
        shares = [BASES[:1], BASES[1:]]
        command = [sys.executable, "-m", "tools.vouch", "part", folder]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started = [
            subprocess.Popen([*command, *bases], env=environment, cwd=ROOT) for bases in shares
        ]
        # Until all have ended, or one has failed
        while None in (codes := [each.poll() for each in started]) and not any(codes):
            time.sleep(0.2)
        for each in started:
            each.terminate()
        if sum(each.wait() != 0 for each in started):
            sys.exit("the small pipeline failed; nothing is vouched for")
        outputs = {
            stage: hashed(Path(folder, base, out) for base in BASES for out in places)
            for stage, places in OUTPUTS.items()
        }
        found = [json.loads(Path(folder, bases[0], "ran.json").read_text()) for bases in shares]
    ran = {(file, name) for each in found for file, name in each["ran"]}
    return outputs | {"profile": found[1]["profiles"]}, ran


def hashed(places: Iterator[Path]) -> str:
    """Return the hash of files and folders, but for the versions that a page names."""
    whole = hashlib.sha256()
    for place in places:
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file():
                data = re.sub(rb"Python 3[^<`]*, torch [^<`]*", b"", file.read_bytes())
                whole.update(
                    f"{file.relative_to(place)} {hashlib.sha256(data).hexdigest()}".encode()
                )
    return whole.hexdigest()[:10]


def run_part(folder: Path, bases: list[str]) -> None:
    """Run the small pipeline of some bases in folders of their names, and note what functions ran.

    Models of rewards are built for all.
    """
    ran = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        ran.add(frame.f_code)

    for base in bases:
        write_settings(folder / base, base)
    gc.disable()  # imports leave no garbage, and looking for it takes a quarter of their time
    os.chdir(folder / bases[0])
    import_module("g2rpo_core.numerics.pins").pin_profile("small")  # before torch is imported
    for stage in OUTPUTS:
        import_module(f"stages.{stage}")
    gc.enable()
    threading.settrace(note)
    sys.settrace(note)
    build(folder, bases)
    for base in bases:
        os.chdir(folder / base)
        for stage in ("prompts", "embed"):
            run(stage)
        for method in METHODS[base]:
            run("train", "--method", method, "--seed", "1")
    about = {}
    if bases[0] == "flux":
        run("published")
        for method, seed in (("base", "0"), ("g2rpo", "1"), ("mine", "0")):
            run("evaluate", "--method", method, "--seed", seed)
        run("report")
    else:
        about = {"profiles": profiles()}
    sys.settrace(None)
    names = {
        (str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname)
        for code in list(ran)
        if Path(code.co_filename).is_relative_to(ROOT)
    }
    Path(folder, bases[0], "ran.json").write_text(json.dumps(about | {"ran": sorted(names)}))


def write_settings(home: Path, base: str) -> None:
    """Write the profile `small` of a base, with seconds of work, into a folder like a checkout."""
    shutil.copytree(ROOT / "profiles", home / "profiles")
    watched = {"every": 1, "prompts": 2, "rewards": ["verifier"]}
    short = {"iterations": 2, "num_generations": 4, "lr_scheduler": "constant", "monitor": watched}
    tree = {"tree": {"sde_steps": [0, 1]}}
    lora = {"lora": {"rank": 2, "alpha": 4.0, "target_modules": ["to_q"]}}
    fits = ["vae", base, "clip_score", "hps"]
    left_out = ("pickscore", "image_reward", "unified_reward")  # seconds each
    profile = {
        "extends": "tiny" if base == "flux" else f"tiny_{base}",
        "models": {"images": 16}
        | dict.fromkeys(left_out)
        | dict.fromkeys(fits, FIT)
        | ({"flux": LONGER} if base == "flux" else {}),
        "prompts": {"train_count": 4, "test_count": 3},
        "sampling": {"steps": 4},
        "training": short,
        "evaluation": {
            "steps": [2],
            "diversity": {"prompts": 2, "noises": 2},
            "rewards": ["hps", "clip_score", "verifier"],
        },
        "methods": {name: {"training": short} for name in METHODS[base]}
        | {name: {"settings": tree, "training": short} for name in TREES}
        | {"lora": {"method": "g2rpo", "settings": tree, "training": short | lora}},
        "published": {"mine": {"folder": "runs/small/lora-1/lora"}},
    }
    with (home / "profiles" / "small.yaml").open("w") as file:
        YAML().dump(profile, file)
    runs = {"profile": "small", "methods": ["g2rpo"], "seeds": [1], "published": ["mine"]}
    (home / "params.yaml").write_text(json.dumps(runs))


def run(stage: str, *words: str) -> None:
    """Run a stage in this process."""
    sys.argv = [stage, "--profile", "small", *words]
    start = time.monotonic()
    import_module(f"stages.{stage}").main()
    print(f"{Path.cwd().name}: {' '.join(sys.argv)}: {time.monotonic() - start:.1f} s", flush=True)


def build(folder: Path, bases: list[str]) -> None:
    """Build the pipelines of these bases, and scorers; share them with the other part's.

    As the stage `models`, but in this process, whose functions are followed.
    """
    config, tiny = import_module("g2rpo_core.config"), import_module("g2rpo_core.tiny_models.build")
    store = import_module("g2rpo_core.hub.model_store")
    import_module("g2rpo_core.numerics.portable").use("portable")
    homes = {base: folder / base / "models" / "small" for base in BASES}
    for base in bases:
        homes[base].mkdir(parents=True)
        os.chdir(folder / base)
        settings = config.load_profile(config.profile_path("small")).models
        tiny.build_pipeline(homes[base], settings)
    for scorer in SCORERS[bases[0]]:
        built = homes[bases[0]] / "built" / scorer
        built.mkdir(parents=True)
        tiny.build_scorer(built, settings, scorer)
    (built.parent / "done").touch()
    for other in SCORERS:  # where its process fails, this one is ended too
        while not (homes[other] / "built" / "done").exists():
            time.sleep(0.2)
        for model in homes[other].glob("built/*/*"):
            for base in bases:
                shutil.copytree(model, homes[base] / model.name)
    for base in bases:
        models = tiny.describe_models(homes[base])
        store.write_lock(homes[base], {name: models[name] for name in models if name != "built"})
        (homes[base] / store.QUALITY).write_text("{}")


def profiles() -> str:
    """Return the hash of what the stage `profile` writes of some profiles."""
    config, stage = import_module("g2rpo_core.config"), import_module("stages.profile")
    written = {
        name: stage.written_data(config.resolve(config.profile_path(name)).data)
        for name in RESOLVED
    }
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:10]


if __name__ == "__main__":
    if sys.argv[1:2] == ["part"]:
        run_part(Path(sys.argv[2]), sys.argv[3:])
    else:
        main(
            os.environ.get("NEW", "").split(),
            bool(os.environ.get("UNTRIED")),
            bool(os.environ.get("BASELINE")),
        )
