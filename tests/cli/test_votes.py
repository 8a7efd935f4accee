"""`g2rpo votes`, and the road from votes to a reward that scores and trains."""

import re
import subprocess

import pandas as pd
import pytest

from g2rpo_core.cli.main import main
from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.rewards.votes import read_votes
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here, run_module
from tests.fixtures.projects import link_made
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
        link_made(tmp_path, name, models, embeddings_folder)
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
    done = run_here(main, *score(project), folder=project)
    assert done.returncode == 0, done.stderr
    scores = pd.read_csv(project / "scores.csv").votes
    assert len(scores) == len(list((project / "votes" / "tiny").iterdir())) and scores.std() > 0.1
    assert "(tiny models, not CLIP Score)" in done.stdout
    words = ["--profile", "mine", "--method", "g2rpo", "--seed", "1"]
    done = run_module("stages.train", *words, folder=project)
    assert done.returncode == 0, done.stderr
    records = pd.read_parquet(project / "runs" / "mine" / "g2rpo-1" / "records.parquet")
    assert records.reward_votes.notna().sum() == 1 and records.heldout_votes.notna().all()


def score(project) -> list[object]:
    """The words that score by `votes` of profile `mine`, with the prompt of each image in a csv."""
    table = read_votes(project / "votes" / "tiny.parquet")
    files = table[["left_file", "right_file"]].stack().str.removeprefix("tiny/")
    rows = pd.DataFrame({"file": files.droplevel(1), "prompt": table.prompt})
    rows.drop_duplicates("file").to_csv(project / "prompts.csv", index=False)
    words = "score --reward votes --profile mine --prompts prompts.csv votes/tiny"
    return words.split()


def test_too_few_votes_are_counted_but_make_no_reward(project):
    file = project / "votes" / "few.parquet"
    read_votes(project / "votes" / "tiny.parquet").iloc[:20].to_parquet(file, index=False)
    done = votes(project, "--file", "votes/few.parquet", "--reward", "verifier")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "no reward from these votes: votes/few.parquet: a reward needs at least 30 votes "
    )


def test_a_profile_that_trains_on_comparisons_leaves_them_out(project):
    """Only rewards of single images are asked; the named server does not exist."""
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
        (["--reward", "nonsense"], "--reward nonsense: unknown; there are hps, clip_score, "),
        (
            ["--reward", "votes"],
            "--reward votes: was fitted to votes, so its agreement with them says nothing",
        ),
        (
            ["--reward", "pairwise"],
            "--reward pairwise: pairwise compares images of a group: train on it, evaluate by ",
        ),
        (["--file", "nowhere.parquet"], "nowhere.parquet: does not exist"),
        (["--file", "params.yaml"], "params.yaml: is not a Parquet file"),
    ],
)
def test_a_mistake_ends_in_one_line(project, words, complaint):
    (project / "params.yaml").write_text("profile: tiny\nmethods: [g2rpo]\nseeds: [1]\n")
    told = refusal(main, "votes", "--profile", "tiny", *words, folder=project)
    assert told.startswith(f"error: {complaint}")


def test_new_votes_stop_a_profile_that_names_others(project):
    file = project / "votes" / "tiny.parquet"
    section = f"{{votes: {{file: votes/tiny.parquet, sha256: {sha256(file)}}}}}"
    (project / "profiles" / "mine.yaml").write_text(MINE.format(section=section))
    read_votes(file).iloc[1:].to_parquet(file, index=False)
    told = run_here(main, *score(project), folder=project)
    new = f"write `sha256: {sha256(file)}`, and what uses the reward runs again\n"
    assert told.returncode == 1 and told.stderr.endswith(new)
    # The command that prints the new line works all the same
    words = ["votes", "--profile", "mine", "--file", "votes/tiny.parquet", "--reward", "verifier"]
    done = run_here(main, *words, folder=project)
    assert done.returncode == 0 and sha256(file) in done.stdout, done.stderr
