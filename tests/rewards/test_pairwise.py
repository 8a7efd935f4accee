"""Win rates within groups: the naive loop, a server of chat completions, refusals."""

import json
import re
from collections import Counter
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML

from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.rewards.pairwise import FIRST, SECOND, calls_per_image, pairs_of, pairwise, winner
from g2rpo_core.rewards.registry import measured_by, settings_of
from g2rpo_core.rewards.scoring import score_all, score_table
from g2rpo_core.rewards.unified_reward import question
from g2rpo_core.training.experience import RolloutSampler, score_rollout
from tests.conftest import ROOT
from tests.fixtures.chat_server import completion, serve
from tests.fixtures.commands import run_here, run_module
from tests.fixtures.errors import refused
from tests.fixtures.projects import link_made
from tests.fixtures.rollouts import redness, small_method

GROUP = 4
PROMPTS = ["a red circle"] * GROUP + ["a rose"] * GROUP
IMAGES = torch.rand(2 * GROUP, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def reward_of(served, concurrency=16, **settings):
    """Quick where a server of a test fails: waits of milliseconds."""
    server = {
        "url": served.url,
        "model": "vlm",
        "backoff": 0.001,
        "timeout": 30,
        "tries": 2,
        "concurrency": concurrency,
    }
    return pairwise(
        None,
        torch.device("cpu"),
        settings_of({"pairwise": {"server": server, **settings}}, "pairwise"),
    )


def think(said: str):
    return completion(
        f"<think>Image 1 (9/10), Image 2 is better in parts</think>\n<answer>{said}</answer>"
    )


def redder(request):
    """Compare the two images that were really sent."""
    first, second = (
        redness(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].double(), None)
        for image in request.images
    )
    return think(FIRST if first > second else SECOND)


def by_hand(images: torch.Tensor) -> torch.Tensor:
    """The share of the other images that each one of a group is redder than."""
    red = redness((images * 255).round().double(), None)
    return torch.tensor([sum(bool(one > other) for other in red) / (len(red) - 1) for one in red])


@pytest.mark.parametrize("both_orders", [False, True])
def test_a_win_rate_is_the_share_of_the_group_that_an_image_beats(both_orders):
    with serve(redder) as served:
        scores, reasons = reward_of(served, both_orders=both_orders).score_groups(
            IMAGES, PROMPTS, GROUP
        )
    torch.testing.assert_close(scores, torch.cat([by_hand(part) for part in IMAGES.split(GROUP)]))
    assert (
        scores.dtype == torch.float32
        and reasons == [None] * 8
        and len(set(scores.tolist())) == GROUP
    )
    assert len(served.requests) == 2 * 6 * (1 + both_orders)  # images of two groups never meet
    asked = Counter(request.question for request in served.requests)
    assert asked == {
        question("think.v1", prompt): 6 * (1 + both_orders) for prompt in ("a red circle", "a rose")
    }


def test_images_are_shown_in_the_order_of_the_group_and_then_swapped():
    """A model that prefers the first place rewards nobody in both orders."""
    with serve(lambda request: think(FIRST)) as served:
        once = reward_of(served).score_groups(IMAGES, PROMPTS, GROUP)[0]
        twice = reward_of(served, both_orders=True).score_groups(IMAGES, PROMPTS, GROUP)[0]
    torch.testing.assert_close(once, torch.tensor([1, 2 / 3, 1 / 3, 0] * 2))
    assert twice.tolist() == [0.5] * 8


@pytest.mark.parametrize("group, opponents", [(12, 2), (12, 4), (7, 4), (6, 4)])
def test_in_a_ring_every_image_meets_as_many_others_in_either_place(group, opponents):
    pairs = pairs_of(group, opponents, False)
    assert len(set(map(frozenset, pairs))) == len(pairs) == group * opponents // 2
    assert Counter(first for first, _ in pairs) == Counter(second for _, second in pairs)
    assert set(Counter(place for pair in pairs for place in pair).values()) == {opponents}


def test_more_opponents_than_a_group_has_are_all_of_them():
    assert pairs_of(4, 4, False) == pairs_of(4, None, False) == list(combinations(range(4), 2))
    both = pairs_of(4, None, True)
    assert len(both) == 12 and {(second, first) for first, second in both} == set(both)
    settings = settings_of({}, "pairwise")
    assert calls_per_image(settings, 12) == 66 / 12
    assert (
        calls_per_image(settings.model_copy(update={"opponents": 4, "both_orders": True}), 12) == 4
    )
    with pytest.raises(
        ValueError, match="rewards.pairwise.opponents: Input should be a multiple of 2"
    ):
        settings_of({"pairwise": {"opponents": 3}}, "pairwise")


def test_a_ring_counts_only_the_pairs_that_met():
    with serve(redder) as served:
        scores, _ = reward_of(served, opponents=2).score_groups(IMAGES[:5], ["a"] * 5, 5)
    red = redness((IMAGES[:5] * 255).round().double(), None)
    expected = [(int(red[n] > red[n - 1]) + int(red[n] > red[(n + 1) % 5])) / 2 for n in range(5)]
    assert scores.tolist() == expected and len(served.requests) == 5


@pytest.mark.parametrize(
    "template, answer, expected",
    [
        ("think.v1", "<think>a</think><answer>Image 1 is better</answer>", 1.0),
        (
            "think.v1",
            "<think>Image 1 is better</think>\n<answer>\nImage 2 is better.\n</answer>",
            0.0,
        ),
        ("think.v1", "<answer>Both images are equally good</answer>", None),
        ("think.v1", "Image 1 is better", None),
        ("think.v1", "<answer>Image 1 is better", None),
        ("rank.v1", "The first is clear. Image 1 is better than Image 2.", 1.0),
        ("rank.v1", "Image 2 is better.", 0.0),
        ("rank.v1", "Both images are equally good.", 0.5),
        ("rank.v1", "Image 1 is better. No: Image 2 is better.", None),
        ("rank.v1", "", None),
    ],
)
def test_the_winner_is_read_as_the_published_code_reads_it(template, answer, expected):
    assert winner(template, answer) == expected


def test_an_answer_without_a_winner_is_half_a_win_for_both():
    """Of the second group's first pair; requests arrive in any order."""
    pair = [
        (image * 255).round().byte().permute(1, 2, 0).tolist()
        for image in IMAGES[GROUP : GROUP + 2]
    ]

    def reply(request):
        return think(
            "I cannot say"
            if [np.array(image).tolist() for image in request.images] == pair
            else FIRST
        )

    with serve(reply) as served:
        scores, reasons = reward_of(served).score_groups(IMAGES, PROMPTS, GROUP)
    assert reasons == [None] * 8 and scores[:4].tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert scores[4:].tolist() == pytest.approx([2.5 / 3, 2.5 / 3, 1 / 3, 0])


def test_a_group_of_which_nothing_can_be_read_has_no_scores():
    """A template that the model does not know must not look like a group of equals."""
    with serve(
        lambda request: (
            completion("Final Score: 4") if "rose" in request.question else redder(request)
        )
    ) as served:
        scores, reasons = reward_of(served).score_groups(IMAGES, PROMPTS, GROUP)
    torch.testing.assert_close(scores[:4], by_hand(IMAGES[:4]))
    assert scores[4:].isnan().all() and reasons[:4] == [None] * 4
    assert set(reasons[4:]) == {
        (
            "no answer names a winner: does template think.v1 fit the model? One answer was 'Final "
            "Score: 4'"
        )
    }


def test_a_pair_without_an_answer_leaves_both_images_without_a_score():
    """One order, one request at a time: the first pair of the second group fails at every try."""
    failing = []

    def reply(request):
        sizes = [np.array(image).tobytes() for image in request.images]
        if "rose" in request.question and not failing:
            failing.append(sizes)
        return (503, {}, b"busy") if sizes in failing else redder(request)

    with serve(reply) as served:
        scores, reasons = reward_of(served, concurrency=1).score_groups(IMAGES, PROMPTS, GROUP)
    assert scores.isnan().tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert all(
        why.startswith("no answer: status 503") and why.endswith("(2 tries)")
        for why in reasons[4:6]
    )
    torch.testing.assert_close(scores[6:], by_hand(IMAGES[4:])[2:])


def test_a_lonely_image_has_no_score_and_odd_groups_are_refused():
    with serve(redder) as served:
        scores, reasons = reward_of(served).score_groups(IMAGES[:2], PROMPTS[:2], 1)
        assert (
            scores.isnan().all()
            and reasons == ["no other image in its group"] * 2
            and not served.requests
        )
        with pytest.raises(ValueError, match="8 images are no groups of 3"):
            reward_of(served).score_groups(IMAGES, PROMPTS, 3)


@pytest.mark.parametrize("name", ["g2rpo", "dance_grpo"])
def test_every_group_of_a_rollout_is_compared_by_itself(policy, embeddings, settings, name):
    """Of several branches and granularities; the reward beside it keeps its scores."""
    method, members = small_method(name), 3
    sampled = RolloutSampler(policy, method, settings[0], members, seed=3)(
        embeddings.conditioning([0, 1]), 0
    )
    texts = [prompt.text for prompt in embeddings.prompts[:2]]
    score = lambda rewards: score_rollout(policy, rewards, sampled, texts, 8, 0)
    with serve(redder) as served:
        rates, red = score({"pairwise": reward_of(served), "redness": redness})
    assert (
        torch.equal(red, score({"redness": redness})[0]) and rates.shape == sampled.clean.shape[:4]
    )
    images = [policy.decode(clean.flatten(0, 2), 8) for clean in sampled.clean]
    expected = torch.stack(
        [by_hand(group) for one in images for group in one.split(members)]
    ).view_as(rates)
    torch.testing.assert_close(rates, expected)
    assert len(served.requests) == rates[..., 0].numel() * 3


def test_single_images_are_refused_in_one_line():
    with serve(redder) as served:
        rewards, line = (
            {"pairwise": reward_of(served)},
            "pairwise compares images of a group: train on it, evaluate by unified_reward",
        )
        with pytest.raises(UserError, match=line):
            score_all(rewards, IMAGES, PROMPTS)
        with pytest.raises(UserError, match=line):
            score_table(rewards, [], IMAGES[:0])
    assert not served.requests


def profile_with(tmp_path, judge="unified_reward", **changes):
    """Profile `tiny` that trains on win rates."""
    yaml = YAML()
    profile = yaml.load(ROOT / "profiles" / "tiny.yaml")
    server = {"url": "http://localhost:8000/v1", "model": "vlm"}
    profile["rewards"] = {"pairwise": {"server": server, "judged_by": judge}}
    profile["training"]["rewards"] = {"pairwise": 1.0}
    for path, value in changes.items():
        section, key = path.split("__")
        profile[section][key] = value
    (tmp_path / "profiles").mkdir(exist_ok=True)
    yaml.dump(profile, file := tmp_path / "profiles" / "mine.yaml")
    return file


def test_a_profile_trains_on_it_and_reports_by_its_judge(tmp_path):
    profile = load_profile(profile_with(tmp_path))
    assert measured_by(profile.training.rewards, profile.rewards) == {"unified_reward": 1.0}
    assert measured_by({"pairwise": 1.0, "unified_reward": 0.5, "hps": 2.0}, profile.rewards) == {
        "unified_reward": 1.5,
        "hps": 2.0,
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"evaluation__rewards": ["hps", "unified_reward", "pairwise"]},
            (
                "evaluation.rewards: pairwise compares images of a group: train on it, "
                "evaluate by unified_reward"
            ),
        ),
        (
            {"training__monitor": {"every": 5, "prompts": 4, "rewards": ["hps", "pairwise"]}},
            (
                "training.monitor.rewards: pairwise compares images of a group: train on it, "
                "evaluate by unified_reward"
            ),
        ),
        (
            {"training__monitor": {"every": 5, "prompts": 4, "rewards": []}},
            (
                "training.monitor.rewards: pairwise compares images of a group: "
                "name one that scores held-out images"
            ),
        ),
        (
            {"judge": "hps", "evaluation__rewards": ["clip_score"]},
            "training.rewards: hps is not among evaluation.rewards",
        ),
        (
            {"rewards__pairwise": {"both_orders": True}},
            (
                "training.rewards: pairwise has no small model that is built here: "
                "set rewards.pairwise.server, use a profile of published models, or remove it"
            ),
        ),
    ],
)
def test_a_profile_that_cannot_use_it_says_what_to_do(tmp_path, changes, message):
    with refused(re.escape(message)):
        load_profile(profile_with(tmp_path, **changes))


@pytest.mark.parametrize(
    "words",
    [["score", "--reward", "pairwise", "pictures"], ["serve-reward", "--reward", "pairwise"]],
)
def test_commands_that_score_single_images_refuse_it(tmp_path, words):
    profile_with(tmp_path)
    done = run_here(main, *words, "--profile", "mine", folder=tmp_path)
    line = (
        "error: --reward pairwise: pairwise compares images of a group: train on it, "
        "evaluate by unified_reward"
    )
    assert done.returncode == 1 and done.stderr.strip().split("\n")[-1] == line


@pytest.mark.pipeline
def test_a_run_trains_on_win_rates(tmp_path, models, embeddings_folder):
    """The mean of all win rates is a half, and held-out prompts have none."""
    with serve(redder) as served:
        profile_with(
            tmp_path,
            rewards__pairwise={
                "server": {"url": served.url, "model": "vlm"},
                "judged_by": "verifier",
            },
            training__iterations=1,
            training__num_generations=3,
            training__monitor={"every": 1, "prompts": 2, "rewards": ["hps"]},
        )
        link_made(tmp_path, "mine", models, embeddings_folder)
        words = ("--profile", "mine", "--method", "g2rpo", "--seed", 1)
        done = run_module("stages.train", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    records = pd.read_parquet(tmp_path / "runs" / "mine" / "g2rpo-1" / "records.parquet")
    last = records.iloc[-1]
    assert (
        last.reward_pairwise == pytest.approx(0.5)
        and last.reward_std_pairwise > 0
        and last.grad_norm > 0
    )
    assert records.heldout_hps.notna().all() and "heldout_pairwise" not in records
    curve = json.loads((tmp_path / "runs" / "mine" / "g2rpo-1" / "curve.json").read_text())
    assert curve and not any("pairwise" in row for row in curve)
    assert len(served.requests) >= 3
