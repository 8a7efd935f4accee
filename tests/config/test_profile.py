import re

import pytest

from g2rpo_core.config import load_profile, load_run, load_study
from g2rpo_core.config.profile import MethodRun
from tests.conftest import ROOT
from tests.fixtures.errors import refused

TINY = (ROOT / "profiles" / "tiny.yaml").read_text()
REWARDS = "unified_reward: {micro_batch: 128, max_new_tokens: 32}"


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "  adv_clip_max: 5.0",
            "  adv_clip_max: 5.0\n  parallel: {compile: true}",
            "training.parallel.compile: compiled code has other bits",
        ),
        (
            "num_generations: 12",
            "num_generation: 12",
            "training.num_generation: unknown key; allowed are iterations, ",
        ),
        (
            "num_generations: 12",
            "num_generations: 1",
            "training.num_generations: Input should be greater than or equal to 2 (got '1')",
        ),
        (
            "num_generations: 12",
            "num_generations: '12'",
            "training.num_generations: Input should be a valid integer (got '12')",
        ),
        (
            "steps: 10\n  shift",
            "steps: 5\n  shift",
            "methods.g2rpo: SDE step 4 needs sampling.steps of at least 6",
        ),
        (
            "g2rpo_no_mgai: {settings: {tree: {sde_steps: [0, 1, 2, 3, 4]}}}",
            "g2rpo_no_mgai: {settings: {tree: {sde_steps: [3, 1]}}}",
            "must be different numbers in rising order",
        ),
        (
            "g2rpo_no_mgai: {settings: {tree: {sde_steps: [0, 1, 2, 3, 4]}}}",
            "g2rpo_no_mgai: {settings: {tree: {sde: wave}}}",
            (
                "methods.g2rpo_no_mgai.settings.tree.sde: Input should be 'flow', "
                "'dance' or 'cps' (got 'wave')"
            ),
        ),
        ("  dance_grpo:", "  grpo:", "methods.grpo: unknown method 'grpo'; allowed are g2rpo, "),
        (
            "rewards: {hps: 1.0",
            "rewards: {hsp: 1.0",
            "training.rewards: unknown reward 'hsp'; allowed are hps, clip_score, pickscore, ",
        ),
        (
            "rewards: {hps: 1.0",
            "rewards: {geneval: 1.0, hps: 1.0",
            (
                "training.rewards: geneval has no small model that is built here: "
                "set rewards.geneval.server, use a profile of published models, or remove it"
            ),
        ),
        (
            REWARDS,
            "red: {settings: {}}",
            "rewards.red: one of your own needs `class: package.module:Class`",
        ),
        (
            REWARDS,
            "unified_reward: {server: {url: here, model: m}}",
            "rewards.unified_reward.server.url: has no host",
        ),
        (
            REWARDS,
            "sharpness: {class: mine:Sharp}",
            "rewards.sharpness: evaluations already measure an image statistic of this name",
        ),
        (
            "  steps:\n  - 10",
            "  steps: [10]\n  checkpoints: [50]",
            "methods.g2rpo: evaluation.checkpoints: 50 is not among training.snapshots",
        ),
        (
            "  iterations: 150",
            "  iterations: 150\n  snapshots: [300]",
            "methods.g2rpo: training.snapshots: 300 is beyond training.iterations",
        ),
        (
            "  steps:\n  - 10",
            "  steps: [10, 10]",
            "evaluation.steps: must be different from each other",
        ),
        (
            "  - hps\n  - clip_score\n  - pick",
            "  - clip_score\n  - pick",
            "training.rewards: hps is not among evaluation.rewards",
        ),
        (
            "  test: shapes",
            "  test: {repo: me/mine, files: [test.txt]}",
            "the verifier only knows captions of the tasks shapes, words, not me/mine",
        ),
        (
            "  test: shapes",
            "  test: words",
            "prompts.test: models of shapes do not know the words of words: ask for shapes",
        ),
        (
            "  clip_score: {steps",
            "  # clip_score: {steps",
            "clip_score is not built: say in models.clip_score how it is trained",
        ),
        ("embed:", "embed: [", "not YAML"),
    ],
)
def test_mistakes_end_in_one_line_with_file_key_and_what_is_allowed(tmp_path, old, new, message):
    assert old in TINY
    path = tmp_path / "mine.yaml"
    path.write_text(TINY.replace(old, new, 1))
    with refused(f"^{path}: .*{re.escape(message)}"):
        load_profile(path)


FLUX = (ROOT / "profiles" / "flux_hps_clip.yaml").read_text()


def section_of(name: str) -> str:
    """The lines of one model in the FLUX profile."""
    return re.search(rf"    {name}:\n(?:      .*\n)+", FLUX)[0]


PIPELINE = section_of("pipeline")


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "      architecture: ViT-H-14\n",
            "",
            "models.repos.hps: needs `architecture`, its name in open_clip, such as ViT-H-14",
        ),
        (PIPELINE, "", "models: repos: needs `pipeline`, the text-to-image model"),
        (
            "    clip_score:\n",
            "    hps_2:\n",
            "models.repos.hps_2: unknown model; allowed are pipeline, hps, clip_score, ",
        ),
        (
            section_of("pickscore_processor"),
            "",
            "evaluation.rewards: pickscore needs pickscore_processor in models.repos",
        ),
        (
            "train: {repo: ymhao/HPDv2,",
            "train: {repo: HPDv2,",
            "prompts.train.repo: 'HPDv2' is no repository of the hub (owner/name)",
        ),
        *(
            (
                "repo: black-forest-labs/FLUX.1-dev",
                f"repo: {wrong}",
                (
                    f"pipeline.repo: {wrong!r} is no repository of the hub (owner/name); weights "
                    "on your own disk are `repo: null` and `folder: PATH`"
                ),
            )
            for wrong in ("/srv/my_flux", "me/my--flux")
        ),
        (
            "  g2rpo_published:",
            "  g2rpo:",
            "published.g2rpo: is the name of a method; choose another name",
        ),
        ("repo: tulvgengenr/MixGRPO", "sha256: {}", "needs either `repo` or `folder`"),
        (
            "trained_on: {hps: 1.0}",
            "trained_on: {verifier: 1.0}",
            "dance_grpo_published.trained_on: 'verifier' is not among evaluation.rewards",
        ),
    ],
)
def test_mistakes_in_a_hub_profile_end_in_one_line(tmp_path, old, new, message):
    assert old in FLUX
    path = tmp_path / "mine.yaml"
    path.write_text(FLUX.replace(old, new, 1))
    with refused(re.escape(message)):
        load_profile(path)


@pytest.mark.parametrize(
    "methods, seeds, published, complaint",
    [
        ("[g2rpo, ppo]", "[1]", "[]", "'ppo' is not in profiles/tiny.yaml; allowed are g2rpo, "),
        (
            "[g2rpo]",
            "[1]",
            "[theirs]",
            "published: 'theirs' is not in section published of .*; allowed are none",
        ),
        ("[]", "[1]", "[]", "methods: name at least one, or a published model"),
    ],
)
def test_params_are_checked_against_their_profile(
    tmp_path, monkeypatch, methods, seeds, published, complaint
):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "params.yaml"
    path.write_text(f"profile: tiny\nmethods: {methods}\nseeds: {seeds}\npublished: {published}\n")
    with refused(complaint):
        load_run(path)


def test_a_methods_published_clip_range_is_its_own_unless_an_entry_says_otherwise(tmp_path):
    """Flow-GRPO-Fast's is a tenth of the section's; an entry's comes before both."""
    profile = load_profile(ROOT / "profiles" / "tiny.yaml")
    clip_ranges = {name: profile.run(name).training.clip_range for name in profile.methods}
    assert clip_ranges == dict.fromkeys(profile.methods, 1e-4) | {"flow_grpo_fast": 1e-5}
    other = {
        "guard": {"method": "grpo_guard"},
        "wide": {"method": "grpo_guard", "training": {"clip_range": 0.1}},
    }
    changed = profile.changed(
        methods={name: MethodRun.model_validate(entry) for name, entry in other.items()}
    )
    assert [changed.run(name).training.clip_range for name in other] == [4e-6, 0.1]


@pytest.mark.parametrize(
    "comparison, complaint",
    [
        (
            "{method: g2rpo, against: flow_grpo}",
            "comparisons.0: 'flow_grpo' is not in methods; allowed are g2rpo, mix_grpo, dance_grpo",
        ),
        (
            "{method: g2rpo, against: mix_grpo, reward: beauty}",
            "comparisons.0.reward: 'beauty' is not in rewards; allowed are training, hps, ",
        ),
    ],
)
def test_a_study_compares_its_own_methods_by_its_own_rewards(comparison, complaint, here):
    (here / "profiles").symlink_to(ROOT / "profiles")
    params = here / "studies" / "steps" / "params.yaml"
    params.parent.mkdir(parents=True)
    text = (ROOT / "studies" / "steps" / "params.yaml").read_text()
    params.write_text(text.replace("comparisons: []", f"comparisons: [{comparison}]"))
    with refused(re.escape(complaint)):
        load_study("steps")


@pytest.mark.parametrize("name", ["flux_lora_1gpu", "sd35_medium_lora_1gpu"])
def test_every_method_trains_a_lora_with_one_learning_rate(name):
    """Rates of whole weights, 10 to 30 times smaller, would make the baselines learn nothing."""
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    assert {profile.run(method).training.learning_rate for method in profile.methods} == {
        profile.training.learning_rate
    }
