"""`g2rpo score --published`: the rewards' weights from a hub on loopback, and nothing else."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from huggingface_hub import constants
from ruamel.yaml import YAML

from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile, resolve
from g2rpo_core.foundation.manifest import describe_files
from g2rpo_core.hub.model_store import LOCK
from g2rpo_core.inference.reward_models import PUBLISHED, folder_of_rewards
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.errors import refused
from tests.fixtures.images import folder_to_score

pytestmark = pytest.mark.pipeline

MAIN = "89abcdef" * 5  # the commit of what the profile does not pin
WORDS = ("score", "--prompts", "prompts.txt", "images")


@pytest.fixture
def repos(models, hub, tmp_path) -> dict[str, str]:
    """Repository by model of the profile of published weights, whose hashes are the tiny models'.

    The hub has all of them, and a pipeline that needs a licence.
    """
    folder_to_score(tmp_path)
    profile = resolve(ROOT / "profiles" / f"{PUBLISHED}.yaml").data
    found = profile["models"]["repos"]
    for name, model in found.items():
        served = describe_files(models / name)
        pinned = served.keys() & model.get("sha256", {})
        model["sha256"] = {file: served[file]["sha256"] for file in pinned}
        licensed = "somebody" if name == "pipeline" else None
        hub.add(model["repo"], model.get("revision", MAIN), models / name, licensed)
    (architecture,) = (path.name for path in (models / "hps").glob("*.json"))
    found["hps"] |= {"architecture": architecture, "files": [*found["hps"]["files"], architecture]}
    YAML().dump(profile, tmp_path / "profiles" / f"{PUBLISHED}.yaml")
    return {name: model["repo"] for name, model in found.items()}


def fetched(name: str) -> dict:
    """The lock of one reward's models, in a folder with that profile."""
    profile = load_profile(Path("profiles", f"{PUBLISHED}.yaml"))
    folder = folder_of_rewards([name], profile.rewards, profile.models.repos)
    return json.loads((folder / LOCK).read_text())


def test_the_named_rewards_alone_are_fetched_once_and_score_the_same(
    repos, hub, models, tmp_path, monkeypatch
):
    given = ("--published", "--reward", "hps,clip_score", "--reward", "pickscore")
    first = run_here(main, *WORDS, *given, "--out", "first.csv", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    needed = ["hps", "clip_score", "pickscore", "pickscore_processor"]
    assert set(hub.asked) == {repos[name] for name in needed}
    pinned = load_profile(ROOT / "profiles" / f"{PUBLISHED}.yaml").models.repos
    hps, clip_score, *pickscore = (
        f"{pinned[name].repo}@{pinned[name].revision[:12]}" for name in needed
    )
    lines = [f"hps: {hps}", f"clip_score: {clip_score}", f"pickscore: {', '.join(pickscore)}"]
    assert re.findall(r"^\w+: \S+/.*", first.stderr, re.MULTILINE) == lines
    table = pd.read_csv(tmp_path / "first.csv")
    assert table.columns.tolist() == ["file", "prompt", "hps", "clip_score", "pickscore"]
    assert "tiny" not in first.stdout
    # Nothing is asked again, so that it works offline
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = run_here(main, *WORDS, *given, "--out", "again.csv", folder=tmp_path)
    assert again.returncode == 0 and hub.asked == [], again.stderr
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "again.csv"), table, check_exact=True)


def test_a_file_that_is_not_the_pinned_one_is_refused(repos, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.repos[repos["hps"]].files["HPS_v2.1_compressed.pt"] = tmp_path / "prompts.txt"
    with refused("models.repos.hps: .*is not the published file that the profile pins"):
        fetched("hps")


def test_the_lowest_are_listed_lowest_first_in_lines_of_their_own(models, tmp_path):
    folder_to_score(tmp_path)
    given = ("--models", models, "--reward", "clip_score,hps", "--worst", 2)
    done = run_here(main, *WORDS, *given, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "scores.csv").sort_values("clip_score")
    head, *lines = done.stdout.splitlines()[1:]
    assert head == "lowest by clip_score:" and len(lines) == 2
    for line, row in zip(lines, table.itertuples()):
        assert line == f"  {row.clip_score:.4f}  {row.file}  {row.prompt}"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("--published", "--models", "mine", "--reward", "hps"),
            "--published, --models mine: each names the weights: give one of the two",
        ),
        (
            ("--published", "--profile", "tiny", "--reward", "hps"),
            (
                "--published, --profile tiny: that profile builds its models: omit --profile, "
                f"or give one with published models, such as {PUBLISHED}"
            ),
        ),
        (
            ("--published", "--reward", "hps,hpsv3"),
            (
                "--published: hpsv3 needs hpsv3 and hpsv3_processor in models.repos: "
                "give a --profile that has it (docs/rewards.md)"
            ),
        ),
        (
            ("--profile", PUBLISHED, "--reward", "hps,clip_score"),
            (
                f"models/{PUBLISHED}/{LOCK}: does not exist; the stage `models` makes it: "
                "dvc repro models; `--published` fetches the published weights of hps, "
                "clip_score alone"
            ),
        ),
    ],
)
def test_without_weights_one_line_says_what_to_do_and_asks_no_hub(
    repos, hub, tmp_path, words, message
):
    done = run_here(main, *WORDS, *words, folder=tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"error: {message}"
    assert "Traceback" not in done.stderr
    assert hub.asked == [] and not (tmp_path / "scores.csv").exists()
