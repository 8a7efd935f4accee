"""The reward of human votes: its fit in closed form, and what it learns from a voter."""

import math
import shutil

import pandas as pd
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.similarity import clip_score
from g2rpo_core.rewards.votes import (
    LEAST_VOTES,
    VotesReward,
    cross_validate,
    decided,
    differences,
    features,
    fit,
    gradient,
    read_votes,
    scale_of,
    won,
)
from tests.fixtures.errors import refused
from tests.fixtures.votes import pairs, write_votes

VOTES = 150


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_votes(tmp_path_factory.mktemp("votes") / "mine.parquet", VOTES)


@pytest.fixture
def own(file, tmp_path):
    """A copy that a test may change."""
    shutil.copytree(file.with_suffix(""), tmp_path / "mine")
    return shutil.copy(file, tmp_path / "mine.parquet")


@pytest.fixture(scope="module")
def scorer(models):
    return clip_score(models / "clip_score", torch.device("cpu"))


@pytest.fixture(scope="module")
def fitted(scorer, file):
    return differences(scorer, file, read_votes(file)), won(read_votes(file))


def section(file, **others) -> dict:
    return {"votes": {"file": str(file), "sha256": sha256(file), **others}}


def test_the_gradient_of_the_fitted_objective_is_zero(fitted):
    differences, wins = fitted
    assert set(wins.tolist()) == {0.0, 0.5, 1.0}
    scaled = differences * scale_of(differences)
    for half in scaled.chunk(2, 1):
        assert half.square().sum(1).mean() == pytest.approx(1)
    for l2 in (0.1, 1.0, 10.0):
        weights = (fit(differences, wins, l2) / scale_of(differences)).requires_grad_()
        z = scaled @ weights
        objective = (F.softplus(z) - wins * z).sum() + l2 / 2 * weights.square().sum()
        (found,) = torch.autograd.grad(objective, weights)
        assert found.abs().max() < 1e-5 and objective < VOTES * math.log(2)
        torch.testing.assert_close(gradient(weights, scaled, wins, l2), found)


def test_one_feature_without_a_prior_is_the_logit_of_the_share_won():
    ones, wins = (
        torch.tensor([[2.0, 0.0]]).double().repeat(8, 1),
        torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]).double(),
    )
    weights = fit(ones, wins, 1e-9)
    assert (
        2 * float(weights[0]) == pytest.approx(math.log(6 / 2), abs=1e-5) and float(weights[1]) == 0
    )


def test_a_head_orders_held_out_pairs_as_the_voter_would(scorer, fitted, file):
    prompts, images, winners = pairs(400, seed=1)
    differ = torch.tensor([winner != "equal" for winner in winners])
    left_won = torch.tensor([winner == "left" for winner in winners])[differ]
    assert differ.sum() > 200
    for sign in (1, -1):  # who votes the other way gets the other order
        reward = VotesReward(scorer, fit(fitted[0], (fitted[1] - 0.5) * sign + 0.5, 1.0).float())
        left, right = (reward(images[side], prompts)[differ] for side in ("left", "right"))
        right_share = float(((sign * (left - right) > 0) == left_won).float().mean())
        assert right_share > 0.7  # chance would be 0.5 +- 0.03


def test_cross_validation_predicts_votes_on_prompts_it_has_not_seen(fitted):
    prompts, _, winners = pairs(VOTES, seed=0)
    table = pd.DataFrame({"prompt": prompts, "winner": winners})
    right, asked = cross_validate(fitted[0], table, 1.0)
    assert asked == len(decided(table)) and right / asked > 0.65
    # Prompts that each have a feature and a winner of their own: who has seen a prompt knows it,
    # and who has not is right by half
    number = torch.arange(VOTES) % 10
    alone = F.one_hot(number, 20).double()
    learned_by_heart = pd.DataFrame(
        {
            "prompt": [f"prompt {each}" for each in number.tolist()],
            "winner": ["left" if each < 5 else "right" for each in number.tolist()],
        }
    )
    assert ((alone @ fit(alone, won(learned_by_heart), 1.0) > 0) == (number < 5)).all()
    assert cross_validate(alone, learned_by_heart, 1.0) == (VOTES // 2, VOTES)


def test_the_head_is_kept_beside_the_votes_and_fitted_again_for_others(models, own, capsys):
    prompts, images, _ = pairs(8, seed=2)
    score = lambda **settings: registry.load(["votes"], models, section=section(own, **settings))[
        "votes"
    ](images["left"], prompts)
    first = score()
    assert first.shape == (8,) and first.dtype == torch.float32 and first.std() > 0
    head = own.parent / "mine.safetensors"
    kept, written = head.read_bytes(), head.stat().st_mtime_ns
    assert torch.equal(score(), first) and head.stat().st_mtime_ns == written
    assert not torch.equal(score(l2=100.0), first)
    assert torch.equal(score(), first) and head.read_bytes() == kept  # bit for bit
    for damaged in (b"damaged", kept[:-1] + bytes([kept[-1] ^ 1])):
        head.write_bytes(damaged)
        assert torch.equal(score(), first) and head.read_bytes() == kept
        assert "mine.safetensors has" in capsys.readouterr().err


def test_a_score_is_the_head_on_the_features(models, scorer, own):
    prompts, images, _ = pairs(4, seed=3)
    reward = registry.load(["votes"], models, section=section(own))["votes"]
    expected = features(scorer, images["right"], prompts) @ reward.weights
    torch.testing.assert_close(
        reward(images["right"], prompts), expected, rtol=0, atol=1e-3
    )  # in logits; float32 of weights of 10
    image, text = scorer.features(images["right"], prompts)
    torch.testing.assert_close((image * text).sum(1), scorer(images["right"], prompts))


def test_new_votes_name_the_hash_to_write_into_the_profile(models, own):
    before = section(own)
    read_votes(own).iloc[:-1].to_parquet(own, index=False)
    for settings, said in (
        (before, "is of other votes than"),
        ({"votes": {"file": str(own)}}, "has to name the votes of"),
    ):
        with pytest.raises(
            UserError, match=f"rewards.votes.sha256: {said} .*: write `sha256: {sha256(own)}`"
        ):
            registry.check("votes", settings)
        with pytest.raises(UserError, match="rewards.votes.sha256: "):
            registry.load(["votes"], models, section=settings)
    registry.check("votes", section(own))


def no_file(file, table):
    file.unlink()


def no_image(file, table):
    (file.parent / table.left_file[3]).unlink()


def other_image(file, table):
    shutil.copy(file.parent / table.left_file[3], file.parent / table.right_file[4])


def few_votes(file, table):
    decided(table).iloc[: LEAST_VOTES - 1].to_parquet(file, index=False)


def few_prompts(file, table):
    table.assign(prompt="a red circle").to_parquet(file, index=False)


def other_winner(file, table):
    table.assign(winner="both").to_parquet(file, index=False)


def leads_out(file, table):
    table.assign(left_file="../" + table.left_file).to_parquet(file, index=False)


def lacks_a_column(file, table):
    table.drop(columns="winner").to_parquet(file, index=False)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (no_file, "mine.parquet: does not exist"),
        (no_image, r"mine/\w+.png: does not exist"),
        (other_image, r"mine/\w+.png: is not the image of the vote in .*mine.parquet: restore it"),
        (
            few_votes,
            (
                "at least 30 votes that name a better image, on 5 prompts; there are 29 on 28: "
                "vote more"
            ),
        ),
        (few_prompts, r"there are \d+ on 1: vote more"),
        (other_winner, "has the winner 'both', not left, equal, right"),
        (leads_out, "row 1: has the left_file '../mine/.*', which leads out of its folder"),
        (lacks_a_column, "has no column 'winner'"),
    ],
)
def test_votes_that_cannot_be_used_are_refused_in_one_line(models, own, spoil, message):
    settings = section(own)
    spoil(own, read_votes(own))
    if own.exists():
        settings = section(own)
    with refused(message):
        registry.load(["votes"], models, section=settings)


NULLS = (None, float("nan"), pd.NA, pd.NaT)
WRONG = {  # column -> values that are none of it
    "prompt": (*NULLS, "", " ", "\u200b", "x" * 5001),
    "winner": (*NULLS, "", "LEFT", 1, True),
    "left_file": (*NULLS, "", "/etc/passwd", "../a.png", ".", "a/../../b"),
    "right_sha256": (*NULLS, "", "0" * 63, "g" * 64, 0),
    "right_run": (*NULLS, "", "x" * 5001),
    "left_seed": (*NULLS, -1, 0.5, 2**63, True, "1", float("inf")),
    "time": (*NULLS, "yesterday"),
    "voter": (*NULLS, "x" * 5001),
    "pair": ("x" * 5001,),
}


@pytest.mark.parametrize(
    "column, value", [(column, value) for column, values in WRONG.items() for value in values]
)
def test_a_row_that_is_no_vote_is_named_with_what_is_wrong(own, column, value):
    table = read_votes(own).astype({column: object})
    table.at[2, column] = value
    try:
        table.to_parquet(own, index=False)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):  # no column holds both types
        table.astype({column: str}).to_parquet(own, index=False)
    with refused(f"mine.parquet: .*row 3: has the {column} .*, (which|not) "):
        read_votes(own)


def test_votes_of_before_pairs_were_counted_are_read(own):
    table = read_votes(own)
    table.drop(columns="pair").to_parquet(own, index=False)
    assert read_votes(own).equals(table) and (table.pair == "").all()
