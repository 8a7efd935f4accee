"""What a person is shown to vote on, and what is kept of the vote, without the browser."""

import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from g2rpo_core.config import load_profile
from g2rpo_core.data.prompts import Prompt, write_prompts
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.inference.demo.vote import draw_pair, keep, offered_prompts
from g2rpo_core.inference.demo.vote_tab import MOST_A_MINUTE, Actions, render_pair
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.runs import find_weights
from g2rpo_core.inference.votes import file_of
from g2rpo_core.rewards.preprocess import pil_images
from g2rpo_core.rewards.votes import WINS, read_images, read_votes
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tasks.task import held_out
from tests.fixtures.projects import small_project

pytestmark = pytest.mark.pipeline
RUNS = ["base", "g2rpo-1", "g2rpo-2"]
PROMPTS = "a large red circle above a small blue square\n\n  a small green cross at the top  \n"


@pytest.fixture(scope="module")
def project(models, tmp_path_factory):
    return small_project(tmp_path_factory.mktemp("vote"), models)


@pytest.fixture(scope="module")
def shared(project):
    return Painter(load_profile(project / "profiles" / "tiny.yaml"), project / "models" / "tiny")


@pytest.fixture
def painter(shared, project, here):
    """In a folder of its own, with the project's runs."""
    for name in ("profiles", "models", "runs"):
        (here / name).symlink_to(project / name)
    return shared


def draw(painter, runs=RUNS, prompts=PROMPTS, seed=0):
    return draw_pair(painter, "tiny", RUNS, prompts, runs, random.Random(seed))


def same(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def test_two_runs_draw_one_prompt_from_one_noise_in_an_order_by_chance(painter):
    pairs = [draw(painter, ["base", "g2rpo-1"], seed=seed) for seed in range(12)]
    assert {(pair.left.run, pair.right.run) for pair in pairs} == {
        ("base", "g2rpo-1"),
        ("g2rpo-1", "base"),
    }
    assert {pair.prompt for pair in pairs} == {
        "a large red circle above a small blue square",
        "a small green cross at the top",
    }
    assert (
        all(pair.left.seed == pair.right.seed for pair in pairs)
        and len({pair.left.seed for pair in pairs}) == 12
    )
    assert len({pair.id for pair in pairs}) == 12
    (conditioning,) = painter.encode([Prompt("", pairs[0].prompt, "")])
    for side in (pairs[0].left, pairs[0].right):
        images = painter.draw(find_weights(side.run, "tiny"), conditioning, [side.seed], 10)
        assert same(side.image, *pil_images(images))
    assert not same(pairs[0].left.image, pairs[0].right.image)


def test_one_run_alone_is_compared_by_two_seeds(painter):
    pair = draw(painter, ["g2rpo-2"])
    assert pair.left.run == pair.right.run == "g2rpo-2" and pair.left.seed != pair.right.seed
    assert not same(pair.left.image, pair.right.image)


def test_the_page_shows_nothing_that_tells_whose_an_image_is_and_the_file_all(painter):
    pair = draw(painter, ["g2rpo-1", "g2rpo-2"])
    html = render_pair(pair, painter.profile.evaluation)
    for side in (pair.left, pair.right):
        assert side.run not in html and str(side.seed) not in html
        assert Image.open(io.BytesIO(side.shown)).info == {} and b"g2rpo" not in side.shown
    keep(file_of("tiny"), pair, "right", "  Ann  ")
    (row,) = read_votes(file_of("tiny")).itertuples()
    assert (row.prompt, row.winner, row.voter) == (pair.prompt, "right", "Ann")
    for side in ("left", "right"):
        (image,) = read_images(file_of("tiny"), read_votes(file_of("tiny")), side)
        assert same(image, getattr(pair, side).image)
        with Image.open(file_of("tiny").parent / getattr(row, f"{side}_file")) as kept:
            said = json.loads(kept.text["g2rpo"])
        assert said["run"] == getattr(row, f"{side}_run") == getattr(pair, side).run
        assert (
            said["seed"] == getattr(row, f"{side}_seed")
            and said["prompt"] == pair.prompt
            and said["steps"] == 10
        )


def test_a_press_counts_once_and_only_for_the_pair_that_was_shown(painter):
    actions = Actions(painter, "tiny", lambda: RUNS)
    _, html, pair, shown = actions.next_pair(None, PROMPTS, RUNS)
    assert "<img" in html and shown == pair.id
    assert (
        actions.next_pair(pair, PROMPTS, RUNS) == (gr.skip(),) * 4
    )  # before the vote nothing changes
    actions.keep("left", pair, "another", "")
    actions.keep("left", None, shown, "")
    assert not file_of("tiny").exists()
    said, gone = actions.keep("left", pair, shown, "")
    assert (
        gone is None
        and f"left {pair.left.run}, seed {pair.left.seed}" in said
        and "you chose the left one" in said
    )
    actions.keep("skip", pair, shown, "")
    assert len(read_votes(file_of("tiny"))) == 1
    said, kept = actions.keep("left", pair, shown, "x" * 101)
    assert "a voter&#39;s name has at most 100 characters" in said and kept is not None
    assert len(read_votes(file_of("tiny"))) == 1


def test_buttons_that_are_pressed_at_once_give_a_pair_one_vote(painter):
    """Each press sees the pair, as it does in a page that is open twice."""
    actions = Actions(painter, "tiny", lambda: RUNS)
    *_, pair, shown = actions.next_pair(None, PROMPTS, RUNS)
    with ThreadPoolExecutor() as pool:
        said = list(
            pool.map(lambda choice: actions.keep(choice, pair, shown, "Ann")[0], list(WINS) * 3)
        )
    assert len(read_votes(file_of("tiny"))) == 1 and read_votes(file_of("tiny")).pair[0] == pair.id
    assert sum("this pair has its vote already" in each for each in said) == 8


def test_no_more_votes_count_in_a_minute_than_people_give(painter):
    actions = Actions(painter, "tiny", lambda: RUNS)
    first = actions.next_pair(None, PROMPTS, RUNS)[2]
    said = [
        actions.keep("left", pair, pair.id, f"voter {number}")[0]
        for number in range(MOST_A_MINUTE + 5)
        for pair in [replace(first, id=str(number))]
    ]
    assert len(read_votes(file_of("tiny"))) == MOST_A_MINUTE
    assert sum("30 votes within a minute: wait a little" in each for each in said) == 5


@pytest.mark.parametrize(
    "prompts, runs, complaint",
    [
        ("x" * (2**18 + 1), RUNS, "prompts: String should have at most 262144 characters"),
        (None, RUNS, "prompts: Input should be a valid string"),
        (PROMPTS, "base", "runs: Input should be a valid tuple"),
        (PROMPTS, ["base", None], "runs.1: Input should be a valid string"),
        (PROMPTS, ["base"] * 2, "a name is there twice"),
        (" \n\n", RUNS, "write prompts to vote on, one on each line"),
        (PROMPTS, [], "tick the runs to compare"),
        (
            PROMPTS,
            ["base", "../../etc"],
            "there is no run '../../etc' here, only base, g2rpo-1, g2rpo-2",
        ),
        ("a circle " * 20, RUNS, "are over the profile's embed.max_sequence_length = 12"),
    ],
)
def test_a_pair_that_cannot_be_drawn_is_said_in_one_sentence(painter, prompts, runs, complaint):
    with pytest.raises(UserError, match=complaint.replace(".", r"\.")):
        draw(painter, runs, prompts)


def test_the_page_begins_with_training_prompts_and_none_of_the_test(painter, tmp_path):
    offered = offered_prompts(painter, "tiny").splitlines()
    assert len(set(offered)) == 50 and not any(
        held_out(TASKS["shapes"].parse(prompt).caption) for prompt in offered
    )
    write_prompts(
        tmp_path / "prompts" / "tiny" / "train.parquet",
        [Prompt("1", "a red cat", ""), Prompt("2", "a dog", "")],
    )
    assert offered_prompts(painter, "tiny") == "a red cat\na dog"
