"""An evaluation: scores, image statistics; shared by processes, interrupted and resumed."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.evaluation.results import measure_diversity, measure_saturation, measure_sharpness
from g2rpo_core.evaluation.run import Evaluation, evaluate_batch
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.manifest import describe_files, write_manifest
from g2rpo_core.sampling.schedule import even_sigmas
from tests.fixtures.errors import refused
from tests.fixtures.rollouts import redness

SETTINGS = EvaluationSettings(steps=(2, 1), height=32, width=32, rewards=("red",), seed=3, batch=10)


class Stopped(Exception):
    """In the middle of an evaluation."""


@pytest.fixture
def evaluation(tmp_path, embeddings):
    """24 prompts in three batches, each with two numbers of steps."""
    return Evaluation(tmp_path / "whole", SETTINGS, ("final",), embeddings, {})


@pytest.fixture
def run(policy, models):
    return lambda part, reward=redness: part.run(
        "run", lambda kept: policy, models / "pipeline", {"red": reward}, 1.0
    )


def test_an_interrupted_evaluation_makes_only_what_is_left_and_ends_the_same(
    evaluation, run, tmp_path
):
    run(evaluation)
    calls = []

    def stopping(images, prompts):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise Stopped
        return redness(images, prompts)

    other = replace(evaluation, folder=tmp_path / "interrupted")
    with pytest.raises(Stopped):
        run(other, stopping)
    assert other.left() == {("final", 2): [2], ("final", 1): [0, 1, 2]}
    run(other, stopping)
    assert calls == [10, 10, 4, 4, 10, 10, 4]
    pd.testing.assert_frame_equal(other.table(), evaluation.table())
    assert len(other.table()) == 2 * 24 * 3  # red, and two image statistics
    images, others = (
        {file.relative_to(each.folder): file.read_bytes() for file in each.folder.rglob("*.png")}
        for each in (evaluation, other)
    )
    assert images == others and len(images) == 2 * 24


def test_processes_share_the_batches_of_every_variant(evaluation):
    two = [replace(evaluation, processes=ProcessGroup(rank, 2)).left() for rank in (0, 1)]
    assert two == [dict.fromkeys(evaluation.variants, mine) for mine in ([0, 2], [1])]


def test_missing_scores_are_asked_for_again_and_too_many_stop(evaluation):
    rows = [("hps", 0.3, None), ("unified_reward", None, "no answer: busy")]
    partly = pd.DataFrame(rows, columns=["reward", "score", "reason"])
    file = evaluation.file(evaluation.variants[0], 0)
    evaluation.folder.mkdir()
    partly.to_parquet(file)
    write_manifest(file.with_suffix(".json"), evaluation.folder, [file.name])
    assert not evaluation.is_complete(evaluation.variants[0], 0)
    missing = partly[partly.score.isna()]  # one of 48 scores
    replace(evaluation, max_missing={"hps": 0.0, "unified_reward": 0.025}).stop_at_missing(missing)
    with refused("reward unified_reward: 1 of 48 scores are missing, .* no answer: busy"):
        replace(evaluation, max_missing={"unified_reward": 0.02}).stop_at_missing(missing)


def test_a_batch_whose_picture_or_scores_are_damaged_is_made_again(evaluation, run, capsys):
    run(evaluation)
    whole = describe_files(evaluation.folder)
    for name in ("out/pictures/final-2/{}.png", "final-2-00001.parquet", "final-2-00001.json"):
        file = evaluation.folder / name.format(evaluation.prompts.prompts[10].id)
        assert file.exists(), sorted(evaluation.folder.rglob("*"))
        file.write_bytes(file.read_bytes()[:-9])
        assert evaluation.left() == {("final", 2): [1], ("final", 1): []}
        assert f"{file.name} has" in (said := capsys.readouterr().err) or "is damaged" in said
        run(evaluation)
        assert describe_files(evaluation.folder) == whole


def test_rows_of_a_batch_hold_rewards_image_statistics_and_diversity(policy, embeddings):
    changes = {"batch": 4, "diversity": {"prompts": 6, "noises": 3}}
    settings = EvaluationSettings.model_validate(SETTINGS.model_dump() | changes)
    red = lambda images, prompts: images[:, 0].mean((1, 2))
    measured = {}  # batch -> the prompts whose diversity is measured with it
    for number in range(6):
        _, images, rows = evaluate_batch(
            policy, embeddings, {"red": red}, settings, even_sigmas(2, 3.0), number, 1.0
        )
        assert rows[rows.reward == "red"].score.tolist() == red(images, None).tolist()
        measured[number] = rows[rows.reward == "diversity"].prompt_id.tolist()
        assert (rows[rows.reward == "diversity"].score > 0).all()
    ids = [prompt.id for prompt in embeddings.prompts]
    assert measured == {0: ids[:4], 1: ids[4:6], 2: [], 3: [], 4: [], 5: []}


def test_image_statistics_have_their_closed_forms():
    grey, red = torch.full((1, 3, 8, 8), 0.4), torch.zeros(1, 3, 8, 8)
    red[:, 0] = 0.7
    assert measure_saturation(torch.cat([grey, red])).tolist() == pytest.approx([0.0, 1.0])
    ramp = torch.linspace(0, 1, 8).expand(1, 3, 8, 8)
    board = torch.zeros(8, 8)
    board[::2, ::2] = board[1::2, 1::2] = 1.0
    flat, checkers = measure_sharpness(torch.cat([ramp, board.expand(1, 3, 8, 8)])).tolist()
    # a plane has no Laplacian; a chessboard's is -4 on white and 4 on black, 18 of the 36 inner
    # pixels each
    assert flat == pytest.approx(0.0, abs=1e-6) and checkers == pytest.approx(4 * (36 / 35) ** 0.5)
    same = torch.rand(1, 5, 3, 8, 8).expand(3, 5, 3, 8, 8)
    moved = torch.stack(
        [torch.zeros(2, 3, 8, 8), torch.full((2, 3, 8, 8), 0.5), torch.ones(2, 3, 8, 8)]
    )
    assert measure_diversity(same).tolist() == pytest.approx([0.0] * 5, abs=1e-3)
    assert measure_diversity(moved).tolist() == pytest.approx([(0.5 + 1.0 + 0.5) / 3] * 2)
