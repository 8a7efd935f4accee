"""What `python -m pipeline.check` says of prompt files, whose contents DVC does not see."""

import pytest
from ruamel.yaml import YAML

from pipeline import check
from stages import profile, prompts
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here

NAMES = ["--profile", "mine"]
TINY = YAML(typ="safe").load(ROOT / "profiles" / "tiny.yaml")


@pytest.fixture
def made(tmp_path):
    """A checkout whose prompts of its own were made by the stages `profile` and `prompts`."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "tiny.yaml").symlink_to(ROOT / "profiles" / "tiny.yaml")
    section = {"train": "mine.txt", "train_count": 5, "test_count": 4, "seed": 0, "test": "shapes"}
    with (tmp_path / "profiles" / "mine.yaml").open("w") as file:
        YAML().dump({"extends": "tiny", "prompts": section}, file)
    (tmp_path / "mine.txt").write_text("a red circle\na blue cross\n")
    (tmp_path / "params.yaml").write_text(
        "profile: mine\nmethods: [g2rpo]\nseeds: [1]\npublished: []\n"
    )
    for stage in (profile, prompts):
        done = run_here(stage.main, *NAMES, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    return tmp_path


def change(made, **sections: dict) -> None:
    """Give sections of the profile these settings."""
    file = made / "profiles" / "mine.yaml"
    settings = YAML(typ="safe").load(file)
    for name, values in sections.items():
        settings[name] = settings.get(name, {}) | values
    YAML().dump(settings, file)


def test_a_prompt_file_that_changed_is_told_with_the_command_that_takes_it_over(made):
    (made / "mine.txt").write_text("a red circle\na green cross\n")
    assert refusal(check.main, folder=made) == (
        "error: mine.txt: changed since prompts/mine was made, which DVC does not see: "
        "dvc repro --force --single-item prompts\n"
    )
    assert run_here(prompts.main, *NAMES, folder=made).returncode == 0
    done = run_here(check.main, folder=made)
    assert done.returncode == 0 and "1,855,392 weights: all weights of 62 modules" in done.stdout


def test_what_a_prompt_file_says_beside_its_prompts_is_told_once_a_file(made):
    row = '{"prompt": "a red circle", "image": "0.png"}\n'
    (made / "edits.jsonl").write_text(row + row.replace("red", "blue"))
    file = made / "profiles" / "mine.yaml"
    file.write_text(file.read_text().replace("mine.txt", "edits.jsonl"))
    done = run_here(check.main, folder=made)
    assert done.returncode == 0 and done.stderr == (
        "warning: edits.jsonl: only its prompts are used, not its columns image\n"
    )


def test_everything_that_is_wrong_is_told_in_one_round(made):
    targets = ["to_q", "to_qkv_mlp_proj"]  # the second is FLUX.2's
    change(
        made,
        prompts={"test": "theirs.txt"},
        rewards={"redness": {"class": "nowhere:Redness"}},
        training={"lora": {"rank": 4, "alpha": 4.0, "target_modules": targets}},
        evaluation={"rewards": [*TINY["evaluation"]["rewards"], "redness"]},
    )
    (made / "theirs.txt").write_text("".join(f"a cat on {count} mats\n" for count in "abcd"))
    done = run_here(check.main, folder=made)
    lines = done.stderr.splitlines()
    assert (
        done.returncode == 1
        and lines[-1] == f"error: {len(lines) - 1} problems to fix before dvc repro"
    )
    for part in (
        "the exact check only knows captions",
        "over the profile's embed.max_sequence_length = 12: shorten them",
        "no module 'nowhere'",
        "no module of FluxTransformer2DModel is called to_qkv_mlp_proj",
    ):
        assert sum(part in line for line in lines) == 1, (part, done.stderr)


def test_prompts_without_a_score_are_told_before_work(made):
    """Training ends at the first; an evaluation allows a share of `max_missing`."""
    change(
        made,
        prompts={"test": "theirs.txt", "test_count": 3},
        rewards={"ocr": {"max_missing": 0.4}},
        training={
            "rewards": {"hps": None, "clip_score": None, "ocr": 1.0},
            "monitor": {"rewards": ["ocr"]},
        },
        evaluation={"rewards": ["ocr"]},
        methods=dict.fromkeys(TINY["methods"].keys() - {"g2rpo"}),
    )
    (made / "mine.txt").write_text('a card with "Ten"\na blue cross\n')
    (made / "theirs.txt").write_text('a card with "One"\na card with "Two"\na cross\n')
    said = (
        "error: profiles/mine.yaml: prompts.{}: ocr has no score for {}, such as {!r}: "
        "the prompt has no text in double quotes"
    )
    lines = run_here(check.main, folder=made).stderr.splitlines()
    assert said.format("train", "1 of 2 prompts", "a blue cross") in lines
    assert not any("prompts.test" in line for line in lines)
    (made / "theirs.txt").write_text('a card with "One"\na circle\na cross\n')
    told = run_here(check.main, folder=made).stderr
    assert "prompts.test: ocr has no score for 2 of 3 prompts" in told


def test_a_method_that_is_inherited_and_does_not_run_hides_no_run(made):
    """Four steps are enough for one SDE step, and too few for the six of most methods."""
    short = {"method": "g2rpo", "settings": {"tree": {"sde_steps": [1]}}}
    change(made, sampling={"steps": 4}, methods={"short": short})
    params = made / "params.yaml"
    params.write_text(params.read_text().replace("[g2rpo]", "[short]"))
    assert run_here(check.main, folder=made).returncode == 0
    # One that the profile itself has must fit
    said = "profiles/mine.yaml: methods.g2rpo: SDE step 4 needs sampling.steps of at least 6"
    change(made, methods={"g2rpo": {"label": "Mine"}})
    assert said in refusal(check.main, folder=made)
