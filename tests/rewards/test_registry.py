"""What the project knows of every built-in reward fits together; a reward of the user's own."""

import re
import sys
import tomllib

import pandas as pd
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML
from torchvision.transforms.v2 import functional as TF

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.rewards import registry as rewards
from g2rpo_core.rewards.registry import (
    REWARDS,
    SPECS,
    labels,
    max_missing,
    models_of,
)
from g2rpo_core.rewards.scoring import score_all
from tests.conftest import ROOT
from tests.fixtures.commands import run_module
from tests.fixtures.errors import refused
from tests.fixtures.projects import link_made

CUSTOM = {
    "redness": {"class": "my_rewards:Redness"},
    "blueness": {"class": "my_rewards:Blueness", "label": "Blue", "max_missing": 0.3},
}


def test_names_aliases_and_labels_belong_to_one_reward_each():
    names = [name for spec in SPECS for name in (spec.name, *spec.aliases)]
    assert len(set(names)) == len(names) and list(REWARDS) == [spec.name for spec in SPECS]
    assert len({spec.label for spec in SPECS}) == len(SPECS) and all(spec.label for spec in SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_reward_says_which_models_it_reads_and_they_are_built(spec, models):
    assert len(set(spec.models)) == len(spec.models) and set(spec.open_clip) <= set(spec.models)
    assert models_of({}, spec.name) == spec.models
    store = ModelStore(models)
    # No small detector comes out of the images of tiny tasks; HPSv3 has no small twin
    if spec.name not in ("geneval", "hpsv3"):
        assert all(store.folder(name).is_dir() for name in spec.models)
    assert all("architecture" in store.entry(name) for name in spec.open_clip)
    # the verifier alone needs none, and OCR brings its own
    assert bool(spec.models) != (spec.tasks_only or bool(spec.requires))
    assert (
        spec.size is None
        or min(spec.size.parameters, spec.size.bytes_per_image, spec.size.flops_per_image) > 0
    )


def test_an_extra_of_the_rewards_name_brings_what_a_reward_requires():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for spec in SPECS:
        brought = {re.match(r"\w+", package)[0] for package in extras.get(spec.name, ())}
        assert set(spec.requires) == brought


def test_rewards_of_the_users_own_stand_beside_the_built_in_ones():
    assert labels(CUSTOM) == {spec.name: spec.label for spec in SPECS} | {
        "redness": "redness",
        "blueness": "Blue",
    }
    assert max_missing(["hps", "blueness"], CUSTOM) == {"hps": 0.05, "blueness": 0.3}


ENTRY = {"class": "my_rewards:Redness", "settings": {"strength": 2.0}}


@pytest.fixture
def folder(tmp_path, models, embeddings_folder):
    """The document's class, a profile that trains on it and scores by it, and what stages made."""
    (code,) = re.findall(
        r"```python\n(class Redness:.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL
    )
    (tmp_path / "my_rewards.py").write_text(code)
    yaml = YAML()
    profile = yaml.load(ROOT / "profiles" / "tiny.yaml")
    profile["rewards"] = {"redness": ENTRY}
    monitor = {"every": 1, "prompts": 2, "rewards": ["hps"]}
    profile["training"] |= {
        "iterations": 1,
        "num_generations": 2,
        "rewards": {"redness": 1.0},
        "monitor": monitor,
    }
    profile["evaluation"] |= {"steps": [2], "rewards": ["redness", "verifier"]}
    (tmp_path / "profiles").mkdir()
    yaml.dump(profile, tmp_path / "profiles" / "mine.yaml")
    link_made(tmp_path, "mine", models, embeddings_folder)
    return tmp_path


@pytest.mark.pipeline
def test_the_readme_example_trains_and_evaluates(folder):
    for stage in ("train", "evaluate"):
        words = ("--profile", "mine", "--method", "g2rpo", "--seed", 1)
        done = run_module(f"stages.{stage}", *words, folder=folder)
        assert done.returncode == 0, done.stderr
    records = pd.read_parquet(folder / "runs" / "mine" / "g2rpo-1" / "records.parquet")
    assert records.reward_redness.notna().sum() == 1 and records.heldout_redness.notna().all()
    table = pd.read_parquet(folder / "evaluations" / "mine" / "g2rpo-1" / "results.parquet")
    scores = table[table.reward == "redness"].set_index("prompt_id").score
    assert len(scores) == 24
    images = folder / "evaluations" / "mine" / "g2rpo-1" / "pictures" / "final-2"
    for key, score in scores.items():
        red, green, blue = (
            TF.pil_to_tensor(Image.open(images / f"{key}.png"))
            .double()
            .mean((1, 2))
            .div(255)
            .tolist()
        )
        assert score == pytest.approx(2 * (red - (green + blue) / 2), abs=0.01)


@pytest.fixture
def red(tmp_path, monkeypatch):
    """red(code, ...) -> the reward of the class Red in a module of that code."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def load(code: str, **entry):
        (tmp_path / "mine.py").write_text(code)
        return rewards.load(["red"], tmp_path, section={"red": {"class": "mine:Red", **entry}})[
            "red"
        ]

    return load


@pytest.mark.parametrize(
    "code, entry, message",
    [
        (
            "",
            {"class": "nowhere.at_all:Red"},
            "rewards.red.class: nowhere.at_all:Red: no module 'nowhere'",
        ),
        ("import absent_package", {}, "no module 'absent_package'"),
        ("class Blue: ...", {}, "the module mine has no 'Red'"),
        ("class Red: ...", {}, "has no method score"),
        (
            "class Red:\n def score(self, i, p): ...",
            {"settings": {"a": 1}},
            (
                "rewards.red.settings: mine:Red got an unexpected keyword argument 'a'; "
                "it takes nothing"
            ),
        ),
    ],
)
def test_a_class_that_cannot_be_had_says_why(red, code, entry, message):
    with refused(re.escape(message)):
        red(code, **entry)


def test_a_misspelt_or_missing_setting_of_the_constructor_is_found_before_work(here, monkeypatch):
    (here / "mine.py").write_text(
        "class Red:\n def __init__(self, strength): ...\n def score(self, images, prompts): ..."
    )
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for given, why in (
        ({"force": 2.0}, "missing a required argument: 'strength'"),
        ({"strength": 1, "a": 2}, "got an unexpected keyword argument 'a'"),
    ):
        with pytest.raises(UserError) as error:
            rewards.check("red", {"red": {"class": "mine:Red", "settings": given}})
        assert str(error.value) == f"rewards.red.settings: mine:Red {why}; it takes strength"
    rewards.check("red", {"red": {"class": "mine:Red", "settings": {"strength": 1}}})


def test_files_of_several_sizes_reach_a_class_as_tensors(red):
    reward = red(
        "class Red:\n def score(self, images, prompts):\n  return images[:, 0].mean((1, 2))"
    )
    files = [
        Image.new("RGB", size, (red, 9, 9))
        for size, red in (((4, 4), 255), ((8, 4), 51), ((4, 4), 0))
    ]
    assert reward(files, ["a"] * 3).tolist() == pytest.approx([1.0, 0.2, 0.0])
    assert reward(files[::2], ["a"] * 2).tolist() == [1.0, 0.0]


def test_a_reward_that_changes_its_images_is_refused(red):
    """Others score the same images, and an evaluation saves them."""
    reward = red(
        "class Red:\n def score(self, images, prompts):\n"
        "  return images.mul_(2).sub_(1).mean((1, 2, 3))"
    )
    with pytest.raises(
        UserError, match=r"rewards.red.class: mine:Red: score\(images, prompts\) changes its images"
    ):
        score_all({"red": reward}, torch.zeros(3, 3, 4, 4), ["a"] * 3)


@pytest.mark.parametrize(
    "returned, got",
    [
        ("images", "a tensor [3, 3, 4, 4]"),
        ("images.mean()", "a tensor []"),
        ("[1.0] * 3", "a list"),
    ],
)
def test_scores_that_are_not_one_number_an_image_are_refused(red, returned, got):
    reward = red(f"class Red:\n def score(self, images, prompts):\n  return {returned}")
    with refused(rf"must return a tensor \[3\], it returned {re.escape(got)}$"):
        reward(torch.zeros(3, 3, 4, 4), ["a"] * 3)
