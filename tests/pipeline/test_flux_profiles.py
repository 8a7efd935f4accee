"""Profiles of published weights before a GPU: true shapes, and every stage from a hub."""

import json
import shutil

import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from g2rpo_core.config import load_profile, resolve
from g2rpo_core.data.embeddings import DTYPES, Conditioning
from g2rpo_core.estimate.tracing import encoding_shapes, shape_of
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.foundation.manifest import describe_files
from g2rpo_core.models.policy import Policy
from pipeline.rehearsal.simulate import number
from tests.conftest import ROOT
from tests.fixtures.chat_server import completion, serve
from tests.fixtures.commands import run_module
from tests.fixtures.layouts import as_bert
from tests.fixtures.small_hub import small_hub

pytestmark = pytest.mark.pipeline

PROFILES = {path.stem: load_profile(path) for path in sorted((ROOT / "profiles").glob("*.yaml"))}
HUB = [name for name, profile in PROFILES.items() if profile.models.source == "hub"]
FIRSTS = {repr(shape_of(PROFILES[name])): name for name in reversed(HUB)}.values()  # of a shape
NAME = "flux_hps_clip"
MAIN = "0" * 40  # the commit of repositories that the profile does not pin: a made-up one
ANSWER = "Alignment Score (1-5): 3.5\nCoherence Score (1-5): 4\nStyle Score (1-5): 3"
STYLES = {
    "anime": ["a small red circle"],
    "concept-art": [],
    "paintings": [],
    "photo": ["a large blue square"],
}
RUNS = (
    ("embed",),
    ("train", "--method", "g2rpo", "--seed", "42"),
    ("evaluate", "--method", "base", "--seed", "0"),
    ("evaluate", "--method", "g2rpo", "--seed", "42"),
    ("evaluate", "--method", "g2rpo_published", "--seed", "0"),
    ("report",),
)


@pytest.mark.parametrize("name", FIRSTS)
def test_true_shapes_fit_through_the_policy(name, monkeypatch):
    """The published configuration in the profile's sizes and dtype, in tensors without memory."""
    # All is on the CPU, and fake weights cannot move; the meta device has no autocast
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    for operation in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
        monkeypatch.setitem(fake_impls.op_implementations_dict, operation, number)
    profile = PROFILES[name]
    base, shape = shape_of(profile)
    sampling, evaluation = profile.sampling, profile.evaluation
    encoded = encoding_shapes(base, shape, profile.embed.max_sequence_length)
    with FakeTensorMode(), torch.no_grad():
        models = (base.transformer(**shape.transformer), base.vae(**shape.vae))
        tensors = lambda: {name: torch.empty(1, *size) for name, size in encoded.items()}
        conditioning = Conditioning(tensors(), tensors() if base.has_negative else None)
        how = (sampling.guidance, DTYPES[sampling.dtype])
        for size, batch in (
            (sampling, profile.training.num_generations),
            (evaluation, evaluation.batch),
        ):
            policy = Policy(base, *models, size.height, size.width, *how)
            latents = base.pack(torch.empty(batch, *policy.unpacked_shape))
            prompts = torch.zeros(batch, dtype=torch.int64)
            velocity = policy.velocity(conditioning)(latents, torch.empty(batch), prompts)
            assert velocity.shape == latents.shape and velocity.dtype == torch.float32
            assert policy.decode(latents[:1], 1).shape == (1, 3, size.height, size.width)


@pytest.mark.parametrize("name", HUB)
def test_one_call_of_a_rollout_has_a_whole_group(name):
    profile = PROFILES[name]
    (base, shape), sampling = shape_of(profile), profile.sampling
    encoded = encoding_shapes(base, shape, profile.embed.max_sequence_length)
    tensors = {name: torch.empty(1, *size, device="meta") for name, size in encoded.items()}
    of_one = sampling.height * sampling.width // 16**2 + base.text_tokens(tensors)
    group = 1 if profile.training.lora else profile.training.num_generations
    assert sampling.batch_tokens >= group * of_one * base.forward_evals(sampling.guidance)


def test_the_papers_table_3():
    """It trains all weights, on 16 GPUs of batch 1."""
    run, evaluation = PROFILES[NAME].run("g2rpo"), PROFILES[NAME].evaluation
    of = lambda part, names: {name: getattr(part, name) for name in names}
    tree = {"eta": 0.7, "sde_steps": tuple(range(8)), "granularities": (1, 2, 3)}
    sampling = {"height": 720, "width": 720, "steps": 16, "shift": 3.0, "guidance": 3.5}
    training = {"iterations": 300, "num_generations": 12, "prompts_per_iteration": 16}
    training |= {"learning_rate": 2e-6, "weight_decay": 1e-4, "max_grad_norm": 1.0, "lora": None}
    training |= {"clip_range": 1e-4, "adv_clip_max": 5.0}
    assert of(run.method.tree, tree) == tree and of(run.sampling, sampling) == sampling
    assert of(run.training, training) == training
    assert (evaluation.height, evaluation.width, evaluation.steps[0]) == (1024, 1024, 50)


def published(models, folder):
    """The profile's data; its models and prompts in tiny, as the repositories have them."""
    data = resolve(ROOT / "profiles" / f"{NAME}.yaml").data
    rows = lambda texts: json.dumps(
        [{"prompt": each, "human_preference": [1, 0]} for each in texts]
    )
    files = {
        "annotations/train.json": rows([*["a large red circle"] * 3, "a small blue square"]),
        "annotations/test.json": rows(["a small red circle", "a large blue square"]),
        **{
            f"lists/benchmark/{style}.json": json.dumps([*texts, f"one more of {style}"])
            for style, texts in STYLES.items()
        },
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in data["models"]["repos"].keys() - {"image_reward_tokenizer"}:
        (folder / name).symlink_to(models / name)
    as_bert(models / "image_reward_tokenizer", folder / "image_reward_tokenizer")
    (folder / "weights").mkdir()  # as yujieouo/G2RPO: without a configuration
    weights = "pipeline/transformer/diffusion_pytorch_model.safetensors"
    shutil.copy(folder / weights, folder / "weights")
    return data


@pytest.mark.slow
def test_every_stage_runs_from_the_hub(models, tmp_path):
    """FLUX.1-dev is gated; UnifiedReward is fetched, and answers from a server."""
    repos, project = tmp_path / "repos", tmp_path / "project"
    profile, small = published(models, repos), {"height": 32, "width": 32}
    for part in ("train", "test"):
        profile["prompts"][part]["distinct"] = 2
    monitor = profile["training"]["monitor"] | {"every": 1, "prompts": 2}
    changes = {
        "embed": {"max_sequence_length": 16},
        "sampling": small,
        "training": {"iterations": 1, "prompts_per_iteration": 1, "num_generations": 2}
        | {"monitor": monitor},
        "evaluation": small | {"steps": [2]},
    }
    for section, values in changes.items():
        profile[section] |= values
    (config,) = [path.name for path in (repos / "hps").glob("*.json")]
    named = {"architecture": config, "files": ["HPS_v2.1_compressed.pt", config]}
    profile["models"]["repos"]["hps"] |= named
    (project / "profiles").mkdir(parents=True)
    with small_hub() as hub, serve(lambda _: completion(ANSWER)) as server:
        hub.add("ymhao/HPDv2", MAIN, repos / "annotations")
        hub.add("zhwang/HPDv2", MAIN, repos / "lists")
        hub.add("yujieouo/G2RPO", MAIN, repos / "weights")
        for name, model in profile["models"]["repos"].items():
            licensed = "token" if name == "pipeline" else None
            hub.add(model["repo"], model.get("revision", MAIN), repos / name, licensed)
            served = describe_files(repos / name)
            model["sha256"] = {
                file: served[file]["sha256"] for file in served if file in model.get("sha256", {})
            }
        about = {"server": {"url": server.url, "model": "UnifiedReward"}}
        profile["rewards"]["unified_reward"] |= about
        YAML().dump(profile, project / "profiles" / f"{NAME}.yaml")
        (project / "params.yaml").write_text(
            f"profile: {NAME}\nmethods: [g2rpo]\nseeds: [42]\npublished: [g2rpo_published]\n"
        )
        asking = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "token"}
        for stage, *words in (("models",), ("prompts",), ("published",), *RUNS):
            offline = "0" if stage in ("models", "prompts", "published") else "1"
            words = (f"stages.{stage}", "--profile", NAME, *words)
            done = run_module(*words, folder=project, HF_HUB_OFFLINE=offline, **asking)
            assert done.returncode == 0, (stage, done.stderr)
    scores = pd.read_parquet(project / "evaluations" / NAME / "g2rpo-42" / "results.parquet")
    assert set(scores.reward) == {*profile["evaluation"]["rewards"], *IMAGE_STATS}
    assert scores.score.notna().all()
    assert scores.score[scores.reward == "unified_reward"].tolist() == [3.5, 3.5]
    report = json.loads((project / "reports" / "report.json").read_text())
    assert report["g2rpo_published-0"]["hps"] == report["base-0"]["hps"]
