"""`g2rpo score` as a user runs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from g2rpo_core.cli.main import main
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.inference import folder as scored
from g2rpo_core.inference.folder import pair
from g2rpo_core.rewards import registry as rewards
from tests.conftest import ROOT
from tests.fixtures.chat_server import completion, serve
from tests.fixtures.commands import run_here
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


@pytest.mark.pipeline
def test_line_n_belongs_to_the_nth_image_by_name(models, folder, tmp_path):
    out = tmp_path / "scores.parquet"
    command = [
        sys.executable,
        "-m",
        "g2rpo_core.cli",
        "score",
        "--reward",
        "hps_v2_1",
        "--reward",
        "pickscore",
        "--prompts",
        tmp_path / "prompts.txt",
        "--models",
        models,
        "--out",
        out,
        folder,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    table = pd.read_parquet(out)
    assert table.columns.tolist() == ["file", "prompt", "hps", "pickscore", "models"]
    assert (
        set(table.models) == {"tiny models, not HPS-v2.1, PickScore"}
        and "(tiny models, not HPS-v2.1, PickScore)" in done.stdout
    )
    assert (
        table.file.tolist() == sorted(f"{name}.png" for name in IMAGES)
        and table.prompt.tolist() == PROMPTS
    )
    images = [IMAGES[name] for name in sorted(IMAGES)]
    expected = rewards.load(["hps"], models)["hps"](images, PROMPTS)
    assert table.hps.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert [path.name for path in tmp_path.iterdir() if "scores" in path.name] == ["scores.parquet"]


def test_a_csv_names_its_images_and_may_name_few(folder, tmp_path):
    (tmp_path / "some.csv").write_text(
        'file,prompt\nwide.png,"a red circle, large"\ntiny.png,a blue cross\n'
    )
    table = pair(folder, tmp_path / "some.csv")
    assert table.to_dict("list") == {
        "file": ["wide.png", "tiny.png"],
        "prompt": ["a red circle, large", "a blue cross"],
    }


def test_rows_that_name_images_belong_to_these_in_any_format(folder, tmp_path):
    rows = pd.DataFrame({"file": sorted(f"{name}.png" for name in IMAGES)[::-1], "prompt": PROMPTS})
    rows.to_json(tmp_path / "p.jsonl", orient="records", lines=True)
    rows.to_parquet(tmp_path / "p.parquet")
    for file in ("p.jsonl", "p.parquet"):
        assert pair(folder, tmp_path / file).to_dict("list") == rows.to_dict("list")


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("p.txt", "one\ntwo\n", "p.txt: 2 lines for the 8 images in "),
        ("p.txt", "one\n" * 7 + " \n", "the prompt of wide.png is empty"),
        ("p.csv", "name,prompt\nwide.png,x\n", "p.csv: needs columns file,prompt; has name,prompt"),
        ("p.csv", "file,prompt\nhigh.png,x\n", "p.csv: high.png is not an image in "),
        ("p.csv", "", "p.csv: needs columns file,prompt; has no row"),
        (
            "p.jsonl",
            '{"file": "wide.png", "prompt": "x"}\n{"prompt": "y"}\n',
            "p.jsonl: 1 of 2 rows have a file: name one in every row",
        ),
    ],
)
def test_prompts_that_do_not_fit_are_named(folder, tmp_path, file, text, message):
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError) as error:
        pair(folder, tmp_path / file)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.pipeline
def test_mistakes_end_in_one_line_and_leave_no_file(models, folder, tmp_path):
    prompts = [
        "--prompts",
        tmp_path / "prompts.txt",
        "--models",
        models,
        "--out",
        tmp_path / "s.csv",
    ]
    (folder / "wide.png").write_bytes(b"half an image")
    done = g2rpo("score", "--reward", "clip_score", *prompts, folder)
    assert done.returncode == 1 and done.stderr.strip().split("\n")[-1].startswith(
        f"error: {folder / 'wide.png'}: "
    )
    assert "Traceback" not in done.stderr and not (tmp_path / "s.csv").exists()
    Image.new("1", (20_000, 20_000)).save(
        folder / "wide.png"
    )  # 50 KiB of file, a gigabyte of picture
    done = g2rpo("score", "--reward", "clip_score", *prompts, folder)
    assert (
        done.returncode == 1
        and "exceeds limit" in done.stderr.strip().split("\n")[-1]
        and "Traceback" not in done.stderr
    )
    IMAGES["wide"].save(folder / "wide.png")
    for words, message in (
        (
            ["--prompts", folder, "--out", tmp_path / "s.csv"],
            f"error: {folder}: prompts are read from ",
        ),
        (
            ["--prompts", tmp_path / "prompts.txt", "--out", folder / "notes.txt" / "s.csv"],
            "cannot be written (File exists)",
        ),
    ):
        done = g2rpo("score", "--reward", "clip_score", "--models", models, *words, folder)
        assert done.returncode == 1 and message in done.stderr.strip().split("\n")[-1]
    done = g2rpo("score", "--reward", "beauty", *prompts, folder)
    assert done.stderr == (
        "error: --reward beauty: unknown; there are hps, clip_score, pickscore, image_reward, "
        "unified_reward, hpsv3, ocr, geneval, votes, "
        "hps_v2_1, hps-v2.1\n"
    )


@pytest.mark.pipeline
def test_a_profile_decides_how_rewards_score(models, folder, tmp_path):
    """UnifiedReward from a server that the profile names, without any model; what it could not have keeps its reason."""

    def reply(request):
        return completion(
            "I would rather not say." if PROMPTS[0] in request.question else "Final Score: 4"
        )

    with serve(reply) as server:
        text = (ROOT / "profiles" / "tiny.yaml").read_text()
        ours = "unified_reward: {micro_batch: 128, max_new_tokens: 32}"
        assert ours in text
        asking = (
            f"unified_reward: {{max_missing: 0.2, server: {{url: '{server.url}', model: vlm, "
            f"concurrency: 1}}}}"
        )
        (tmp_path / "profiles").mkdir()
        (tmp_path / "profiles" / "mine.yaml").write_text(text.replace(ours, asking))
        (tmp_path / "profiles" / "strict.yaml").write_text(
            text.replace(ours, asking.replace("0.2", "0.1"))
        )
        words = [
            "score",
            "--reward",
            "unified_reward",
            "--prompts",
            tmp_path / "prompts.txt",
            folder,
        ]
        done = g2rpo(*words, "--profile", "mine", "--out", tmp_path / "s.csv", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        table = pd.read_csv(tmp_path / "s.csv")
        assert table.columns.tolist() == [
            "file",
            "prompt",
            "unified_reward",
            "unified_reward_reason",
        ]
        assert table.unified_reward.isna().tolist() == [True] + [False] * 7 and set(
            table.unified_reward[1:]
        ) == {4.0}
        assert (
            "I would rather not say." in table.unified_reward_reason[0]
            and table.unified_reward_reason[1:].isna().all()
        )
        assert [request.body["model"] for request in server.requests] == ["vlm"] * 8
        done = g2rpo(*words, "--profile", "strict", "--out", tmp_path / "t.csv", folder=tmp_path)
    last = done.stderr.strip().split("\n")[-1]
    assert done.returncode == 1 and last.startswith(
        "error: reward unified_reward: 1 of 8 scores are missing, more than "
    )
    assert len(pd.read_csv(tmp_path / "t.csv")) == 8  # nothing is lost


@pytest.mark.pipeline
def test_what_was_scored_is_kept_and_a_second_start_goes_on(folder, tmp_path, monkeypatch):
    """A server that fails in the middle: only the part without all its scores is asked again; afterwards nothing is left beside."""
    monkeypatch.setattr(scored, "BATCH", 4)
    failing = [PROMPTS[5]]

    def reply(request):
        return completion(
            "?" if any(prompt in request.question for prompt in failing) else "Final Score: 4"
        )

    with serve(reply) as server:
        settings = f"server: {{url: '{server.url}', model: vlm, concurrency: 1, tries: 1}}"
        (tmp_path / "profiles").mkdir()
        shutil.copy(ROOT / "profiles" / "tiny.yaml", tmp_path / "profiles" / "tiny.yaml")
        (tmp_path / "profiles" / "mine.yaml").write_text(
            f"extends: tiny\nrewards: {{unified_reward: {{{settings}}}}}\n"
        )
        words = [
            "score",
            "--reward",
            "unified_reward",
            "--prompts",
            tmp_path / "prompts.txt",
            "--profile",
            "mine",
            folder,
        ]
        done = g2rpo(*words, "--out", tmp_path / "s.csv", folder=tmp_path)
        assert (
            done.returncode == 1
            and "1 of 8 scores are missing" in done.stderr
            and len(server.requests) == 8
        )
        failing.clear()
        done = g2rpo(*words, "--out", tmp_path / "s.csv", folder=tmp_path)
        assert done.returncode == 0 and len(server.requests) == 8 + 4, done.stderr
    assert set(pd.read_csv(tmp_path / "s.csv").unified_reward) == {4.0}
    assert not list(tmp_path.glob(".s.csv*"))


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
def test_scores_of_another_code_of_a_reward_are_not_gone_on_with(tmp_path):
    """The first 64 images are scored, then the class fails; once its file is another, all are scored anew."""
    (tmp_path / "many").mkdir()
    for number in range(70):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "many" / f"{number:02d}.png")
    (tmp_path / "prompts.txt").write_text("a red circle\n" * 70)
    (tmp_path / "profiles").mkdir()
    shutil.copy(ROOT / "profiles" / "tiny.yaml", tmp_path / "profiles" / "tiny.yaml")
    (tmp_path / "profiles" / "mine.yaml").write_text(
        'extends: tiny\nrewards: {half: {class: "half:Half"}}\n'
    )
    words = ["score", "--reward", "half", "--prompts", "prompts.txt", "--profile", "mine", "many"]
    command = [sys.executable, "-m", "g2rpo_core.cli", *words]
    ends = []
    for code in (HALF.format(good=1, score=1), HALF.format(good=9, score=2)):
        (tmp_path / "half.py").write_text(code)
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        ends.append(done.returncode)
    assert ends == [1, 0] and set(pd.read_csv(tmp_path / "scores.csv").half) == {2.0}, done.stderr


@pytest.mark.pipeline
def test_the_prompts_are_never_written_over(models, folder, tmp_path):
    prompts = folder / "prompts.csv"
    prompts.write_text("file,prompt\nwide.png,a red circle\n")
    (tmp_path / "link.csv").symlink_to(prompts)
    for out in (prompts, tmp_path / "link.csv"):
        for given in (["--prompts", prompts], []):  # the one in the folder is read if none is given
            done = g2rpo(
                "score", "--reward", "hps", "--models", models, *given, "--out", out, folder
            )
            assert (
                done.returncode == 1
                and done.stderr == f"error: --out {out}: is the file of prompts: give another\n"
            )
    assert prompts.read_text() == "file,prompt\nwide.png,a red circle\n"
