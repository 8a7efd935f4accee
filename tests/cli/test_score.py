"""`g2rpo score` as a user runs it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from g2rpo_core.cli.main import main
from g2rpo_core.rewards.registry import load
from tests.conftest import ROOT
from tests.fixtures.chat_server import completion, serve
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.images import IMAGES, PROMPTS


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name, image in IMAGES.items():
        image.save(folder / f"{name}.png")
    (folder / "notes.txt").write_text("no image")
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    return folder


def g2rpo(*words: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run_here(main, *words, folder=folder)


def profile(folder: Path, name: str, rewards: str) -> None:
    """Write a profile that extends `tiny` with these settings of rewards."""
    (folder / "profiles").mkdir(exist_ok=True)
    shutil.copy(ROOT / "profiles" / "tiny.yaml", folder / "profiles")
    text = f"extends: tiny\nrewards: {{{rewards}}}\n"
    (folder / "profiles" / f"{name}.yaml").write_text(text)


@pytest.mark.pipeline
def test_line_n_belongs_to_the_nth_image_by_name(models, folder, tmp_path):
    rewards = ("--reward", "hps_v2_1", "--reward", "pickscore", "--models", models)
    files = ("--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "scores.parquet", folder)
    done = g2rpo("score", *rewards, *files, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    table = pd.read_parquet(tmp_path / "scores.parquet")
    assert table.columns.tolist() == ["file", "prompt", "hps", "pickscore", "models"]
    assert set(table.models) == {"tiny models, not HPS-v2.1, PickScore"}
    assert "(tiny models, not HPS-v2.1, PickScore)" in done.stdout
    assert table.file.tolist() == sorted(f"{name}.png" for name in IMAGES)
    assert table.prompt.tolist() == PROMPTS
    images = [IMAGES[name] for name in sorted(IMAGES)]
    expected = load(["hps"], models)["hps"](images, PROMPTS)
    assert table.hps.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert [path.name for path in tmp_path.glob("*scores*")] == ["scores.parquet"]


@pytest.mark.pipeline
def test_mistakes_end_in_one_line_and_leave_no_file(models, folder, tmp_path):
    out, prompts = ["--out", tmp_path / "s.csv"], ["--prompts", tmp_path / "prompts.txt"]

    def last_line(*words: object, reward: str = "clip_score") -> str:
        done = g2rpo("score", "--reward", reward, "--models", models, *words, folder)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        return done.stderr.strip().split("\n")[-1]

    # 50 KiB of file, a gigabyte of picture
    Image.new("1", (20_000, 20_000)).save(folder / "wide.png")
    assert "exceeds limit" in last_line(*out, *prompts)
    IMAGES["wide"].save(folder / "wide.png")
    assert last_line(*out, *prompts, reward="beauty") == (
        "error: --reward beauty: unknown; there are hps, clip_score, pickscore, image_reward, "
        "unified_reward, hpsv3, ocr, geneval, hps_v2_1, hps-v2.1"
    )
    assert not (tmp_path / "s.csv").exists()


@pytest.mark.pipeline
def test_a_profile_decides_how_rewards_score(folder, tmp_path):
    """Needs no model; a score that could not be had has its reason."""
    refuses = "I would rather not say."

    def reply(request):
        return completion(refuses if PROMPTS[0] in request.question else "Final Score: 4")

    with serve(reply) as server:
        asking = f"server: {{url: '{server.url}', model: vlm, concurrency: 1}}"
        for name, share in {"mine": 0.2, "strict": 0.1}.items():
            profile(tmp_path, name, f"unified_reward: {{max_missing: {share}, {asking}}}")
        words = ("score", "--reward", "unified_reward", "--prompts", tmp_path / "prompts.txt")
        done = g2rpo(
            *words, "--profile", "mine", "--out", tmp_path / "s.csv", folder, folder=tmp_path
        )
        assert done.returncode == 0, done.stderr
        table = pd.read_csv(tmp_path / "s.csv")
        scores, reasons = table.unified_reward, table.unified_reward_reason
        assert table.columns[2:].tolist() == ["unified_reward", "unified_reward_reason"]
        assert scores.isna().tolist() == [True] + [False] * 7 and set(scores[1:]) == {4.0}
        assert refuses in reasons[0] and reasons[1:].isna().all()
        assert [request.body["model"] for request in server.requests] == ["vlm"] * 8
        done = g2rpo(
            *words, "--profile", "strict", "--out", tmp_path / "t.csv", folder, folder=tmp_path
        )
    last = done.stderr.strip().split("\n")[-1]
    assert done.returncode == 1 and last.startswith(
        "error: reward unified_reward: 1 of 8 scores are missing, more than "
    )
    assert len(pd.read_csv(tmp_path / "t.csv")) == 8  # nothing is lost


HALF = """
from g2rpo_core.foundation.errors import UserError

class Half:
    asked = 0

    def score(self, images, prompts):
        Half.asked += 1
        if Half.asked > {good}:
            raise UserError("no more today")
        return images.mean((1, 2, 3)) * 0 + {score}
"""


@pytest.mark.pipeline
def test_a_second_start_goes_on_but_not_with_scores_of_another_code(tmp_path, monkeypatch):
    """70 images are two parts, of which the first code scores one in each start."""
    # The second code is as long as the first, and perhaps of the same second
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "many").mkdir()
    for number in range(70):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "many" / f"{number:02d}.png")
    (tmp_path / "prompts.txt").write_text("a red circle\n" * 70)
    profile(tmp_path, "mine", 'half: {class: "half:Half"}')
    words = ["score", "--reward", "half", "--prompts", "prompts.txt", "--profile", "mine", "many"]
    ends = []
    for good, score in ((1, 1), (1, 1), (9, 2)):
        (tmp_path / "half.py").write_text(HALF.format(good=good, score=score))
        sys.modules.pop("half", None)
        done = g2rpo(*words, folder=tmp_path)
        scores = tmp_path / "scores.csv"
        ends.append((done.returncode, scores.exists() and set(pd.read_csv(scores).half)))
    assert ends == [(1, False), (0, {1.0}), (0, {2.0})], done.stderr


@pytest.mark.pipeline
def test_the_prompts_are_never_written_over(models, folder, tmp_path):
    prompts = folder / "prompts.csv"
    prompts.write_text("file,prompt\nwide.png,a red circle\n")
    (tmp_path / "link.csv").symlink_to(prompts)
    out = tmp_path / "link.csv"
    words = ("--reward", "hps", "--models", models, "--out", out, folder)
    told = refusal(main, "score", *words, folder=ROOT)
    assert told == f"error: --out {out}: is the file of prompts: give another\n"
