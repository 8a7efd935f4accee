"""`g2rpo votes`, and the road from votes to a reward that scores and trains."""

import os
import re
import subprocess
import sys

import pandas as pd
import pytest

from g2rpo_core.cli.main import main
from g2rpo_core.hub.model_store import sha256
from g2rpo_core.rewards.votes import read_votes
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.votes import write_votes

pytestmark = pytest.mark.pipeline
MINE = """extends: tiny
rewards: {section}
training:
  iterations: 1
  num_generations: 2
  rewards: {{hps: null, clip_score: null, votes: 1.0}}
  monitor: {{every: 1, prompts: 2, rewards: [votes]}}
evaluation: {{rewards: [hps, votes, verifier]}}
"""


@pytest.fixture
def project(tmp_path, models, embeddings_folder):
    """A checkout with votes of tiny, models and embeddings of tiny and of `mine`."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "tiny.yaml").symlink_to(ROOT / "profiles" / "tiny.yaml")
    for name in ("tiny", "mine"):
        for path, target in {
            f"models/{name}": models,
            f"embeddings/{name}/train": embeddings_folder,
            f"embeddings/{name}/test": embeddings_folder,
        }.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).symlink_to(target)
    write_votes(tmp_path / "votes" / "tiny.parquet", 120)
    return tmp_path


def votes(project, *words: object) -> subprocess.CompletedProcess[str]:
    return run_here(main, "votes", "--profile", "tiny", *words, folder=project)


def test_votes_become_a_reward_that_scores_and_trains(project):
    done = votes(project, "--reward", "verifier", "--reward", "hps_v2_1")
    assert done.returncode == 0, done.stderr
    first, wins, verifier, hps, note, predicts, use = done.stdout.splitlines()
    table = read_votes(project / "votes" / "tiny.parquet")
    count = int((table.winner != "equal").sum())
    assert first.startswith("votes/tiny.parquet: 120 votes on ") and wins.startswith(
        "base beats g2rpo-1 in "
    )
    assert verifier.startswith(
        f"Verifier (exact) (verifier) agrees with {count} of {count}, 100.0 % ("
    )
    assert re.fullmatch(
        rf"HPS-v2.1 \(hps\) agrees with \d+ of {count}, [\d.]+ % \([\d.]+ % to [\d.]+ %\)", hps
    )
    assert note == "note: scores are from tiny models, not HPS-v2.1"
    right = int(
        re.match(rf"a reward fitted to these votes predicts (\d+) of {count}, ", predicts)[1]
    )
    assert right / count > 0.65 and predicts.endswith(
        "on prompts that it has not seen; 50 % is chance"
    )
    # Into a profile, as it says
    section = use.removeprefix("to use it: rewards: ")
    (project / "profiles" / "mine.yaml").write_text(MINE.format(section=section))
    done = run_here(
        main,
        "score",
        "--reward",
        "votes",
        "--profile",
        "mine",
        "--prompts",
        prompts(project),
        "votes/tiny",
        folder=project,
    )
    assert done.returncode == 0, done.stderr
    scores = pd.read_csv(project / "scores.csv").votes
    assert len(scores) == len(list((project / "votes" / "tiny").iterdir())) and scores.std() > 0.1
    assert "(tiny models, not CLIP Score)" in done.stdout
    command = [
        sys.executable,
        "-m",
        "stages.train",
        "--profile",
        "mine",
        "--method",
        "g2rpo",
        "--seed",
        "1",
    ]
    done = subprocess.run(
        command,
        cwd=project,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{project}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    records = pd.read_parquet(project / "runs" / "mine" / "g2rpo-1" / "records.parquet")
    assert records.reward_votes.notna().sum() == 1 and records.heldout_votes.notna().all()


def prompts(project):
    """A csv with the prompt of each image."""
    table = read_votes(project / "votes" / "tiny.parquet")
    sides = [
        pd.DataFrame(
            {"file": table[f"{side}_file"].str.removeprefix("tiny/"), "prompt": table.prompt}
        )
        for side in ("left", "right")
    ]
    pd.concat(sides).drop_duplicates("file").to_csv(project / "prompts.csv", index=False)
    return project / "prompts.csv"


def test_too_few_votes_are_counted_but_make_no_reward(project):
    file = project / "votes" / "few.parquet"
    read_votes(project / "votes" / "tiny.parquet").iloc[:20].to_parquet(file, index=False)
    done = votes(project, "--file", "votes/few.parquet", "--reward", "verifier")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "no reward from these votes: votes/few.parquet: a reward needs at least 30 votes "
    )


def test_a_profile_that_trains_on_comparisons_leaves_them_out(project):
    """Of the usual rewards, those that score single images are asked; the server that it names does not exist."""
    section = "{pairwise: {server: {url: http://127.0.0.1:9, model: vlm}}}"
    text = (
        f"extends: tiny\nrewards: {section}\n"
        f"training: {{rewards: {{hps: null, clip_score: null, pairwise: 1.0}}}}\n"
    )
    (project / "profiles" / "pairs.yaml").write_text(
        text + "evaluation: {rewards: [verifier, unified_reward]}\n"
    )
    file = project / "votes" / "tiny.parquet"
    (project / "models" / "pairs").symlink_to(project / "models" / "tiny")
    done = run_here(main, "votes", "--profile", "pairs", "--file", file, folder=project)
    assert done.returncode == 0, done.stderr
    assert ["verifier", "unified_reward"] == re.findall(r"\((\w+)\) agrees with", done.stdout)


@pytest.mark.parametrize(
    "words, complaint",
    [
        (
            ["--reward", "nonsense"],
            "error: --reward nonsense: unknown; there are hps, clip_score, ",
        ),
        (
            ["--reward", "votes"],
            "error: --reward votes: was fitted to votes, so its agreement with them says nothing",
        ),
        (
            ["--reward", "pairwise"],
            (
                "error: --reward pairwise: pairwise compares images of a group: train on it, "
                "evaluate by "
            ),
        ),
        (["--file", "nowhere.parquet"], "error: nowhere.parquet: does not exist"),
        (["--file", "params.yaml"], "error: params.yaml: is not a Parquet file"),
    ],
)
def test_a_mistake_ends_in_one_line(project, words, complaint):
    (project / "params.yaml").write_text("profile: tiny\nmethods: [g2rpo]\nseeds: [1]\n")
    done = votes(project, *words)
    assert (
        done.returncode == 1 and done.stderr.startswith(complaint) and done.stderr.count("\n") == 1
    )


def test_new_votes_stop_a_profile_that_names_others(project):
    file = project / "votes" / "tiny.parquet"
    section = f"{{votes: {{file: votes/tiny.parquet, sha256: {sha256(file)}}}}}"
    (project / "profiles" / "mine.yaml").write_text(MINE.format(section=section))
    read_votes(file).iloc[1:].to_parquet(file, index=False)
    done = run_here(
        main,
        "score",
        "--reward",
        "votes",
        "--profile",
        "mine",
        "--prompts",
        prompts(project),
        "votes/tiny",
        folder=project,
    )
    new = f"write `sha256: {sha256(file)}`, and what uses the reward runs again\n"
    assert done.returncode == 1 and done.stderr.endswith(new)
    # The command that prints the new line works all the same
    done = run_here(
        main,
        "votes",
        "--profile",
        "mine",
        "--file",
        "votes/tiny.parquet",
        "--reward",
        "verifier",
        folder=project,
    )
    assert done.returncode == 0 and sha256(file) in done.stdout, done.stderr
