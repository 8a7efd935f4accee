"""A reward of the user's own stands beside the built-in ones, and what is wrong with it is said."""

import re
import sys

import pytest
import torch
from PIL import Image

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.rewards import registry as rewards
from g2rpo_core.rewards.scoring import score_all
from tests.conftest import ROOT
from tests.fixtures.errors import refused


@pytest.mark.parametrize(
    "document, settings", [("README.md", {}), ("docs/rewards.md", {"strength": 2.0})]
)
def test_the_class_of_the_documentation_scores_with_its_settings(
    document, settings, tmp_path, monkeypatch
):
    code = re.search(r"(?s)```python\n(.*?)```", (ROOT / document).read_text())[1]
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    entry = {"class": "my_rewards:Redness", "settings": settings}
    reward = rewards.load(["redness"], tmp_path, section={"redness": entry})["redness"]
    images = [Image.new("RGB", (4, 4), color) for color in ("red", "yellow", "white")]
    assert reward(images, ["a"] * 3).tolist() == pytest.approx(
        [settings.get("strength", 1.0) * red for red in (1.0, 0.5, 0.0)]
    )


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
        ("class Blue: ...", {}, "the module mine has no 'Red'"),
        ("class Red: ...", {}, "has no method score"),
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
    with refused("missing a required argument: 'strength'; it takes strength"):
        rewards.check("red", {"red": {"class": "mine:Red", "settings": {"force": 2.0}}})
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
        ("[1.0] * 3", "a list"),
    ],
)
def test_scores_that_are_not_one_number_an_image_are_refused(red, returned, got):
    reward = red(f"class Red:\n def score(self, images, prompts):\n  return {returned}")
    with refused(rf"must return a tensor \[3\], it returned {re.escape(got)}$"):
        reward(torch.zeros(3, 3, 4, 4), ["a"] * 3)
