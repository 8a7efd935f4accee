"""Every image of a run is drawn as it was trained, and compared with the base drawn alike."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from ruamel.yaml import YAML

from g2rpo_core.cli.main import main as g2rpo
from g2rpo_core.config import load_profile
from g2rpo_core.data.prompts import captions, write_prompts
from g2rpo_core.inference.runs import sampling_of
from g2rpo_core.models.policy import Policy
from stages import evaluate, profile, report
from tests.conftest import ROOT, embed
from tests.fixtures.commands import run_here
from tests.fixtures.weights import randomize

ENTRIES = {"apart": 1.0, "also_apart": 1.0}  # trained with another guidance than the profile's
RUNS = ["g2rpo-1", *(f"{name}-1" for name in ENTRIES)]


def write_yaml(file: Path, data: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    YAML().dump(data, file)


@pytest.fixture(scope="module")
def evaluated(models, tmp_path_factory) -> Path:
    """A profile with entries of their own guidance, whose runs have the base's weights."""
    folder = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(ROOT / "profiles", folder / "profiles")
    changed = {
        "extends": "tiny",
        "prompts": {"test_count": 4},
        "methods": {
            name: {"method": "diffusion_nft", "sampling": {"guidance": value}}
            for name, value in ENTRIES.items()
        },
        "evaluation": {
            "steps": [3],
            "rewards": ["hps", "clip_score"],
            "batch": 4,
            "diversity": None,
        },
    }
    write_yaml(folder / "profiles" / "mixed.yaml", changed)
    named = f"profile: mixed\nmethods: [g2rpo, {', '.join(ENTRIES)}]\nseeds: [1]\npublished: []\n"
    (folder / "params.yaml").write_text(named)
    (folder / "models").mkdir()
    (folder / "models" / "mixed").symlink_to(models)
    embed(folder / "embeddings" / "mixed", models, 4, 12)
    (folder / "embeddings" / "mixed" / "train").rename(folder / "embeddings" / "mixed" / "test")
    for part in ("train", "test"):  # the embedded ones are those of tests
        texts = captions("shapes", 4, 0, testing=part == "train")
        write_prompts(folder / "prompts" / "mixed" / f"{part}.parquet", texts)
    for run in RUNS:
        home = folder / "runs" / "mixed" / run
        shutil.copytree(models / "pipeline" / "transformer", home / "transformer")
        record = {
            "iteration": [0, 1],
            "num_forward_evals": [0.0, 9.0],
            "num_transitions": [0, 2],
            "heldout_hps": [0.1, 0.1],
        }
        pd.DataFrame(record).to_parquet(home / "records.parquet")
    made(folder, profile)
    for method, seed in (("base", 0), *(run.rsplit("-", 1) for run in RUNS)):
        made(folder, evaluate, "--method", method, "--seed", seed)
    made(folder, report)
    return folder


def made(folder: Path, stage, *words: object) -> None:
    done = run_here(stage.main, "--profile", "mixed", *words, folder=folder)
    assert done.returncode == 0, done.stderr


def scores(folder: Path, run: str) -> pd.DataFrame:
    return pd.read_parquet(folder / "evaluations" / "mixed" / run / "results.parquet")


def test_weights_that_are_the_bases_score_as_the_base_drawn_alike(evaluated):
    first, second = scores(evaluated, "base-0"), scores(evaluated, "base-0/guidance_1")
    assert set(first.method) == {"base"} and set(second.method) == {"base.guidance_1"}
    assert not first.score.equals(second.score)
    assert scores(evaluated, "g2rpo-1").score.equals(first.score)
    for name in ENTRIES:
        assert scores(evaluated, f"{name}-1").score.equals(second.score)
    # Once for each guidance, however many runs have it
    assert [
        path.parent.name
        for path in sorted((evaluated / "evaluations/mixed/base-0").rglob("*.parquet"))
    ] == [
        "guidance_1",
        "base-0",
    ]
    of_first = json.loads((evaluated / "reports" / "metrics" / "base-0.json").read_text())
    assert of_first["hps"] == pytest.approx(first[first.reward == "hps"].score.mean())


def test_pictures_are_drawn_as_the_run_was_trained(evaluated):
    def drawn(*words: str) -> dict[str, dict]:
        folder = evaluated / "pictures" / "-".join(words).replace("/", "_")
        how = ("generate", "a red circle", "--steps", 2, "--out", folder)
        done = run_here(g2rpo, *how, *words, folder=evaluated)
        assert done.returncode == 0, done.stderr
        return {
            path.name: json.loads(Image.open(path).text["g2rpo"]) for path in folder.glob("*.png")
        }

    guidance = lambda found: {
        name.removesuffix("-0000-0.png"): about["guidance"] for name, about in found.items()
    }
    assert guidance(drawn("--run", "base")) == {"base": 3.5}
    several = drawn("--run", "base", "--run", "g2rpo-1", "--run", "apart-1")
    assert guidance(several) == {
        "base": 3.5,
        "base.guidance_1": 1.0,
        "g2rpo-1": 3.5,
        "apart-1": 1.0,
    }
    assert guidance(drawn("--run", "runs/mixed/apart-1")) == {"runs_mixed_apart-1": 1.0}
    # The pictures, not only what is written of them
    other = Policy.load_to_train(
        evaluated / "models" / "mixed" / "pipeline", height=32, width=32, guidance=1.0
    )
    randomize(other.transformer)
    other.save(evaluated / "runs" / "mixed" / "apart-2")

    def pixels(*words: str) -> bytes:
        (name,) = drawn("--run", "apart-2", *words)
        return Image.open(
            evaluated / "pictures" / "-".join(("--run", "apart-2", *words)) / name
        ).tobytes()

    assert pixels() == pixels("--guidance", "1") != pixels("--guidance", "3.5")


def test_a_run_elsewhere_is_drawn_as_its_own_profile_and_study_say(evaluated, monkeypatch):
    monkeypatch.chdir(evaluated)
    tiny, mixed = (
        load_profile(evaluated / "profiles" / f"{name}.yaml") for name in ("tiny", "mixed")
    )
    assert sampling_of("runs/mixed/apart-1", "tiny", tiny).guidance == 1.0
    assert sampling_of("runs/mixed/apart-1/snapshots/000010", "tiny", tiny).guidance == 1.0
    assert sampling_of("profiles", "mixed", mixed).guidance == 3.5  # weights of others
    study = {
        "study": "mine",
        "profile": "tiny",
        "methods": ["quiet"],
        "seeds": [1],
        "title": "Mine",
        "about": "about",
        "equal": ["nothing"],
        "entries": {
            "quiet": {
                "method": "g2rpo",
                "settings": {"tree": {"sde_steps": [0, 1]}},
                "sampling": {"guidance": 2.0},
            }
        },
    }
    write_yaml(Path("studies/mine/params.yaml"), study)
    Path("studies/mine/runs/quiet-1").mkdir(parents=True)
    assert sampling_of("studies/mine/runs/quiet-1", "mixed", mixed).guidance == 2.0
