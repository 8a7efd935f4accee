"""Profiles of published weights before a GPU: true shapes, and every stage from a hub."""

import json
import shutil
import signal
import sys
from pathlib import Path

import open_clip
import pandas as pd
import pytest
import torch
from huggingface_hub import constants
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from ruamel.yaml import YAML
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from g2rpo_core.config import load_profile, resolve
from g2rpo_core.data.embeddings import DTYPES, Conditioning
from g2rpo_core.estimate.tracing import encoding_shapes, shape_of
from g2rpo_core.evaluation.results import LABELS as IMAGE_STATS
from g2rpo_core.foundation.manifest import describe_files
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards import registry as rewards
from g2rpo_core.rewards.preprocess import Preprocess
from g2rpo_core.rewards.similarity import CosineScore
from g2rpo_core.rewards.spec import ScorerSettings
from g2rpo_core.sampling.schedule import shifted_sigmas
from pipeline.rehearsal.simulate import number
from stages import embed, evaluate, report, train
from tests.conftest import ROOT
from tests.fixtures.chat_server import completion, serve
from tests.fixtures.commands import run_module
from tests.fixtures.layouts import as_bert, as_qwen
from tests.fixtures.small_hub import small_hub

pytestmark = pytest.mark.pipeline

ALL = [
    path.stem
    for path in sorted((ROOT / "profiles").glob("*.yaml"))
    if load_profile(path).models.source == "hub"
]
PROFILES = [
    name for name in ALL if name.startswith("flux_") and name not in ("flux_krea", "flux_schnell")
]  # of FLUX.1-dev
VARIED = ("flux_hps_clip", "flux_lora_24gb")  # the others differ from these in numbers
MAIN = "0" * 40  # the commit of repositories that the profiles do not pin: a made-up one
STYLES = {
    "anime": ["a small red circle"],
    "concept-art": [],
    "paintings": [],
    "photo": ["a large blue square"],
}


@pytest.fixture
def without_memory(monkeypatch):
    """Tensors have shape, dtype and device, and no memory; the meta device has no autocast."""
    monkeypatch.setattr(
        torch.nn.Module, "to", lambda module, *_, **__: module
    )  # all is on the CPU, and fake weights cannot move
    for operation in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
        monkeypatch.setitem(fake_impls.op_implementations_dict, operation, number)
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("name", ALL)
def test_true_shapes_fit_through_the_policy(name, without_memory):
    """The published configuration in the profile's sizes and dtype."""
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    base, shape = shape_of(profile)
    sampling, encoded = (
        profile.sampling,
        encoding_shapes(base, shape, profile.embed.max_sequence_length),
    )
    with torch.no_grad():
        transformer, vae = base.transformer(**shape.transformer), base.vae(**shape.vae)
        tensors = lambda: {name: torch.empty(1, *size) for name, size in encoded.items()}
        conditioning = Conditioning(tensors(), tensors() if base.has_negative else None)
        for size, batch in (
            (sampling, profile.training.num_generations),
            (profile.evaluation, profile.evaluation.batch),
        ):
            policy = Policy(
                base,
                transformer,
                vae,
                size.height,
                size.width,
                sampling.guidance,
                DTYPES[sampling.dtype],
            )
            latents = base.pack(torch.empty(batch, *policy.unpacked_shape))
            velocity = policy.velocity(conditioning)(
                latents, torch.empty(batch), torch.zeros(batch, dtype=torch.int64)
            )
            assert velocity.shape == latents.shape and velocity.dtype == torch.float32
            assert policy.decode(latents[:1], 1).shape == (1, 3, size.height, size.width)
            assert policy.image_tokens == size.height * size.width // 16**2
    group = (
        1 if profile.training.lora else profile.training.num_generations
    )  # what one call of the rollout has
    of_one = sampling.height * sampling.width // 16**2 + base.text_tokens(conditioning.tensors)
    assert sampling.batch_tokens >= group * of_one * policy.forward_evals


def test_the_open_clip_scorers_read_the_published_architecture(without_memory):
    model = open_clip.create_model("ViT-H-14")
    assert sum(parameter.numel() for parameter in model.parameters()) == 986_109_441
    tokenize = open_clip.get_tokenizer("ViT-H-14")
    preprocess = Preprocess(
        model.visual.image_size[0], "pad", OPENAI_DATASET_MEAN, OPENAI_DATASET_STD, rgb="first"
    )
    encode = lambda texts: model.encode_text(tokenize(texts))
    scorer = CosineScore(
        model.encode_image, encode, preprocess, torch.device("cpu"), ScorerSettings()
    )
    assert scorer(torch.empty(2, 3, 1024, 768), ["a red circle", "a blue square"]).shape == (2,)


@pytest.mark.parametrize("name", ["flux_hps", "flux_hps_clip"])
def test_the_papers_table_3(name):
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    method, sampling, training, evaluation = (
        profile.run("g2rpo").method,
        profile.sampling,
        profile.training,
        profile.evaluation,
    )
    assert (sampling.height, sampling.width, sampling.steps, sampling.shift) == (720, 720, 16, 3.0)
    assert (method.tree.eta, method.tree.sde_steps, method.tree.granularities) == (
        0.7,
        (0, 1, 2, 3, 4, 5, 6, 7),
        (1, 2, 3),
    )
    assert (training.num_generations, training.weight_decay) == (12, 1e-4)
    assert (training.max_grad_norm, training.clip_range, training.adv_clip_max) == (1.0, 1e-4, 5.0)
    assert training.iterations == 300
    if training.lora is None:  # the paper trains all weights, on 16 GPUs of batch 1
        assert (training.learning_rate, training.prompts_per_iteration) == (2e-6, 16)
    assert (evaluation.height, evaluation.width, evaluation.steps[0], sampling.guidance) == (
        1024,
        1024,
        50,
        3.5,
    )
    assert profile.run("g2rpo").sampling == sampling
    assert len(shifted_sigmas(sampling.steps, sampling.shift)) == 17


@pytest.fixture(scope="module")
def layouts(models, tmp_path_factory):
    """The tiny models in the layouts of the published repositories."""
    root = tmp_path_factory.mktemp("layouts")
    for folder in models.iterdir():
        if folder.is_dir():
            (root / folder.name).symlink_to(folder)
    for name, published in (("image_reward_tokenizer", as_bert), ("unified_reward", as_qwen)):
        (root / name).unlink()
        published(models / name, root / name)
    return root


@pytest.fixture(scope="module")
def hub(layouts, tmp_path_factory):
    """FLUX.1-dev is gated; the data sets of prompts have two texts each."""
    annotations, lists = tmp_path_factory.mktemp("annotations"), tmp_path_factory.mktemp("lists")
    rows = lambda *texts: json.dumps(
        [{"prompt": text, "human_preference": [1, 0]} for text in texts]
    )
    (annotations / "train.json").write_text(
        rows(*["a large red circle"] * 3, "a small blue square")
    )
    (annotations / "test.json").write_text(rows("a small red circle", "a large blue square"))
    (lists / "benchmark").mkdir()
    for style, texts in STYLES.items():
        (lists / "benchmark" / f"{style}.json").write_text(
            json.dumps([*texts, f"one more of {style}"])
        )
    with small_hub() as hub:
        for profile in PROFILES:
            for name, model in load_profile(
                ROOT / "profiles" / f"{profile}.yaml"
            ).models.repos.items():
                hub.add(
                    model.repo,
                    model.revision or MAIN,
                    layouts / name,
                    "token" if name == "pipeline" else None,
                )
        hub.add("ymhao/HPDv2", MAIN, annotations)
        hub.add("zhwang/HPDv2", MAIN, lists)
        published = tmp_path_factory.mktemp(
            "published"
        )  # as yujieouo/G2RPO: weights without a configuration
        shutil.copy(
            layouts / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors", published
        )
        hub.add("yujieouo/G2RPO", MAIN, published)
        yield hub


def ready(request):
    return completion("Alignment Score (1-5): 3.5\nCoherence Score (1-5): 4\nStyle Score (1-5): 3")


@pytest.fixture
def sigterm_as_before():
    """A stage takes SIGTERM for itself; here it runs inside pytest."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, before)


def run_stages(name: str, profile: dict, hub, folder: Path, home: Path, monkeypatch) -> None:
    """`models` and `prompts` in processes, with the hub's true client; the other stages here."""
    small = {"height": 32, "width": 32}
    for part in ("train", "test"):
        profile["prompts"][part]["distinct"] = 2
    profile["embed"] |= {"max_sequence_length": 16}
    profile["sampling"] |= small
    profile["training"] |= {"iterations": 1, "prompts_per_iteration": 1, "num_generations": 2}
    profile["training"]["monitor"] |= {"every": 1, "prompts": 2}
    profile["evaluation"] |= small | {"steps": [2]}
    (folder / "profiles").mkdir()
    YAML().dump(profile, folder / "profiles" / f"{name}.yaml")
    (folder / "params.yaml").write_text(
        f"profile: {name}\nmethods: [g2rpo]\nseeds: [42]\npublished: [g2rpo_published]\n"
    )

    asking = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "token"}
    online = {"HF_HUB_OFFLINE": "0"}
    for stage in ("models", "prompts", "published"):
        done = run_module(f"stages.{stage}", "--profile", name, folder=folder, **asking, **online)
        assert done.returncode == 0, done.stderr
        looked_up = json.loads((folder / "reports" / "revisions" / f"{stage}.json").read_text())
        assert set(looked_up.values()) == {MAIN}
    test = pd.read_parquet(folder / "prompts" / name / "test.parquet")
    assert list(test["style"]) == ["anime", "photo"]
    lock = json.loads((folder / "models" / name / "models.lock.json").read_text())
    assert {key: (entry["repo"], entry["revision"]) for key, entry in lock.items()} == {
        key: (model["repo"], model.get("revision", MAIN))
        for key, model in profile["models"]["repos"].items()
    }

    monkeypatch.chdir(folder)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    for stage, words in (
        (embed, []),
        (train, ["--method", "g2rpo", "--seed", "42"]),
        (evaluate, ["--method", "base", "--seed", "0"]),
        (evaluate, ["--method", "g2rpo", "--seed", "42"]),
        (evaluate, ["--method", "g2rpo_published", "--seed", "0"]),
        (report, []),
    ):
        monkeypatch.setattr(sys, "argv", [stage.__name__, "--profile", name, *words])
        stage.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in VARIED else pytest.param(name, marks=pytest.mark.engines)
        for name in PROFILES
    ],
)
def test_every_stage_runs_from_the_hub(
    name, hub, layouts, models, tmp_path, tmp_path_factory, monkeypatch, sigterm_as_before
):
    """UnifiedReward comes from a server; its repository is fetched and read all the same."""
    home = tmp_path_factory.getbasetemp() / "flux_home"  # one cache for all profiles
    profile = resolve(ROOT / "profiles" / f"{name}.yaml").data
    # All five, also where the profile's card is too small for them
    every = ["hps", "clip_score", "pickscore", "image_reward", "unified_reward"]
    assert set(profile["evaluation"]["rewards"]) <= set(every)
    profile["evaluation"]["rewards"] = every
    full = resolve(ROOT / "profiles" / "flux_hps_clip.yaml").data["models"]["repos"]
    profile["models"]["repos"] = full | profile["models"]["repos"]
    for key, model in profile["models"]["repos"].items():
        served = describe_files(layouts / key)
        model["sha256"] = {
            file: served[file]["sha256"] for file in served if file in model.get("sha256", {})
        }
    architectures = [path.name for path in (layouts / "hps").glob("*.json")]
    profile["models"]["repos"]["hps"] |= {
        "architecture": architectures[0],
        "files": ["HPS_v2.1_compressed.pt", *architectures],
    }
    with serve(ready) as server:
        profile["rewards"]["unified_reward"]["server"] = {
            "url": server.url,
            "model": "UnifiedReward",
        }
        run_stages(name, profile, hub, tmp_path, home, monkeypatch)
    records = pd.read_parquet(Path("runs", name, "g2rpo-42", "records.parquet"))
    assert records.num_forward_evals.tolist()[-1] > 0
    scores = pd.read_parquet(Path("evaluations", name, "g2rpo-42", "results.parquet"))
    assert set(scores.reward) == {*profile["evaluation"]["rewards"], *IMAGE_STATS}
    assert scores.score.notna().all() and scores.score[
        scores.reward == "unified_reward"
    ].tolist() == [3.5, 3.5]
    images, texts = torch.rand(2, 3, 32, 32), ["a large red circle", "a small blue square"]
    scorers = [
        rewards.load(["unified_reward"], folder)["unified_reward"]
        for folder in (Path("models", name), models)
    ]
    published, ours = (scorer.score_with_reasons(images, texts)[1] for scorer in scorers)
    assert (
        published == ours and "the answer was" in ours[0]
    )  # hardly trained, it answers in no template's words, but the same
    text = Path("reports", "report.md").read_text()
    assert "published weights" in text.split("\n")[0] and "| G²RPO, published |" in text
    report = json.loads(Path("reports", "report.json").read_text())
    assert report["g2rpo_published-0"]["hps"] == report["base-0"]["hps"]
