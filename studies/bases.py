"""Make each base of a study a DVC project that builds models and embeddings, trains, evaluates.

The study makes the report. The folder of base 2 is studies/<study>/base-2, and its name, for
`--study` of the stages, <study>/base-2.
"""

import io
from pathlib import Path

from ruamel.yaml import YAML

from g2rpo_core.config import Study
from g2rpo_core.foundation.profiles import OF_BASE
from g2rpo_core.foundation.runs import read_lock

MAIN = Path("dvc.yaml")
BUILDING = {"models": "models", "embed": "embeddings"}  # stage of the main project -> its folder
UP = "../../../"  # from a base's folder


def of_base(study: Study, base: int) -> Study:
    """Return the study on one of its bases."""
    return study.model_copy(update={"study": f"{study.study}{OF_BASE}{base}"})


def base_graph(graph: Path) -> str:
    """Return a base's dvc.yaml: a study's stages but the report, and those that build models.

    graph: the dvc.yaml of all studies; the stages that build models are the main project's.
    """
    yaml = YAML(typ="safe", pure=True)
    # Paths begin one folder further down, and the models are the base's own
    text = (
        graph.read_text().replace("../../", UP).replace("cd ../.. ", f"cd {UP.removesuffix('/')} ")
    )
    for own in ("models", "embeddings"):
        text = text.replace(f"{UP}{own}/${{profile}}", own)
    stages = yaml.load(text)["stages"]
    del stages["report"]
    main = yaml.load(MAIN)["stages"]
    for name, folder in BUILDING.items():
        deps = [
            "models" if dep == "models/${profile}" else UP + dep
            for dep in main[name].get("deps", [])
        ]
        command = f"cd {UP.removesuffix('/')} && {main[name]['cmd']} --study ${{study}}"
        stages[name] = {
            "cmd": command,
            "params": main[name]["params"],
            "deps": deps,
            "outs": [folder],
        }
    return _dumped({"stages": stages})


def base_params(study: Study) -> str:
    """Return the params.yaml of a base: what its dvc.yaml refers to."""
    return _dumped(
        study.model_dump(
            mode="json", include={"study", "profile", "methods", "seeds", "entries", "changes"}
        )
    )


def lend_models(home: Path, profile: str) -> None:
    """Write the first dvc.lock of a base, from the study that last built this base, if any.

    It has the stages of models and embeddings: DVC takes their outputs from its cache where code
    and settings are the same, and builds them anew where they are not. home: the base's folder,
    studies/<study>/base-<number>.
    """
    if (home / "dvc.lock").exists():
        return
    for lock in sorted(
        home.parents[1].glob(f"*/{home.name}/dvc.lock"), key=lambda lock: -lock.stat().st_mtime
    ):
        there, here = (
            f"--profile {profile} --study {base.parts[-2]}/{base.name}"
            for base in (lock.parent, home)
        )
        built = {
            name: stage
            for name, stage in read_lock(lock).items()
            if name in BUILDING and there in stage["cmd"]
        }
        if built:
            lent = {
                name: {**stage, "cmd": stage["cmd"].replace(there, here)}
                for name, stage in built.items()
            }
            (home / "dvc.lock").write_text(_dumped({"schema": "2.0", "stages": lent}))
            return


def _dumped(data: dict) -> str:
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = (
        False  # DVC's parser refuses the ":" of a reward's class between braces
    )
    yaml.dump(data, text)
    return text.getvalue()
