"""What holds for every reward with weights: batches, forms of images, texts encoded once.

And HPS-v2.1, CLIP Score and PickScore score as open_clip and transformers do, used directly as the
published model cards use them.
"""

import json
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from torchvision.transforms.v2 import functional as TF
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.rewards import registry as rewards
from g2rpo_core.rewards.scoring import note_cut
from g2rpo_core.rewards.similarity import clip_score
from tests.fixtures.errors import refused
from tests.fixtures.images import IMAGES, PROMPTS, SEEN

NAMES = ["hps", "clip_score", "pickscore", "image_reward"]


@pytest.fixture(scope="module")
def scorers(models):
    return rewards.load(NAMES, models)


@pytest.fixture(params=NAMES)
def scorer(request, scorers):
    return scorers[request.param]


def tensor(image) -> torch.Tensor:
    return TF.to_dtype(TF.pil_to_tensor(image), torch.float32, scale=True)


def test_a_batch_equals_its_parts_in_any_order(scorer, monkeypatch):
    """Also where it is scored a few images at a time."""
    images = list(IMAGES.values())
    monkeypatch.setattr(scorer, "micro_batch", 3)
    together = scorer(images, PROMPTS)
    assert together.shape == (8,) and together.dtype == torch.float32 and not together.requires_grad
    alone = torch.cat([scorer([image], [prompt]) for image, prompt in zip(images, PROMPTS)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        scorer(images[::-1], PROMPTS[::-1]).flip(0), together, rtol=0, atol=1e-5
    )
    assert together.std() > 0


def test_a_resized_tensor_differs_from_the_image_by_the_rounding_of_pil_alone(scorer):
    """PIL rounds to 8 bits between its two passes and after them: under 2.5 of 255 in any pixel."""
    for name in ("square", "wide", "tall", "odd"):
        image = IMAGES[name]
        std = torch.tensor(scorer.preprocess.std).view(3, 1, 1)
        ours, theirs = (
            scorer.preprocess(images, torch.device("cpu"))[0] * std
            for images in (tensor(image)[None], [image])
        )
        assert ours.shape == (3, 32, 32)
        assert (ours - theirs).abs().max() < 2.5 / 255


@pytest.mark.parametrize(
    "name, largest",
    [("hps", 0.02), ("clip_score", 0.02), ("pickscore", 2e-3), ("image_reward", 0.05)],
)
def test_bfloat16_is_close_and_its_scores_are_float32(models, scorers, name, largest):
    """bfloat16 has 8 bits: about 0.004 of a value, in every layer."""
    scorer = rewards.load([name], models, section={name: {"dtype": "bfloat16"}})[name]
    scores, exact = (
        scorer(list(IMAGES.values()), PROMPTS),
        scorers[name](list(IMAGES.values()), PROMPTS),
    )
    assert scores.dtype == torch.float32 and scorer.dtype == torch.bfloat16
    assert 1e-6 < (scores - exact).abs().max() < largest


@pytest.mark.parametrize("mode", ["1", "P", "CMYK"])
def test_the_same_pixels_have_one_score_whatever_the_mode_of_their_file(scorer, mode):
    image = IMAGES["square"].convert(mode)
    assert scorer([image], PROMPTS[:1]).equal(scorer([image.convert("RGB")], PROMPTS[:1]))


def with_weight(file: Path, **changed: torch.Tensor) -> None:
    weights = torch.load(file)
    weights.get("state_dict", weights).update(changed or {"logit_scale": torch.tensor(4)})
    torch.save(weights, file)


@pytest.mark.parametrize(
    "name, file, change, said",
    [
        (
            "clip_score",
            "open_clip_pytorch_model.bin",
            lambda file: file.rename(file.with_name("epoch_32.pt")),
            "no weights that open_clip finds, only epoch_32.pt.*; name them open_clip_pytorch",
        ),
        (
            "clip_score",
            "open_clip_pytorch_model.bin",
            lambda file: with_weight(file, positional_embedding=torch.zeros(15, 64)),
            r"positional_embedding is \[15, 64\], and its architecture has \[16, 64\]",
        ),
        ("clip_score", "open_clip_pytorch_model.bin", with_weight, "logit_scale is int64"),
        ("hps", "HPS_v2.1_compressed.pt", with_weight, "logit_scale is int64"),
        ("hps", "HPS_v2.1_compressed.pt", Path.unlink, "has 0 files HPS_v2.1_compressed.pt"),
        ("image_reward", "ImageReward.pt", with_weight, "logit_scale is int64"),
        ("pickscore_processor", "tokenizer.json", Path.unlink, "or vocab.json; merges.txt$"),
        ("image_reward_tokenizer", "tokenizer.json", Path.unlink, "json, or vocab.txt$"),
    ],
)
def test_what_a_library_would_make_up_is_refused_by_name(
    models, tmp_path, name, file, change, said
):
    """Random weights, positions between others, codes as weights, a vocabulary of a few words."""
    store = ModelStore(shutil.copytree(models, tmp_path / "models"))
    change(store.root / name / file)
    store.folder = lambda each: store.root / each  # without its check of hashes
    spec = rewards.REWARDS[name.partition("_pro")[0].partition("_tok")[0]]
    with refused(said):
        spec.build(store, torch.device("cpu"), spec.settings())


def test_every_image_needs_a_prompt(scorers):
    with pytest.raises(ValueError, match="8 images and 2 prompts"):
        scorers["hps"](list(IMAGES.values()), PROMPTS[:2])


def test_missing_models_say_which_stage_makes_them(here):
    with refused("dvc repro models"):
        rewards.load(["hps"], Path("models", "tiny"))


@pytest.fixture
def resized(models, tmp_path):
    """resized(...) -> the folder of a CLIP whose config asks for that way to make images small."""
    folder = shutil.copytree(models / "clip_score", tmp_path / "clip_score")
    config = json.loads((folder / "open_clip_config.json").read_text())
    del config["preprocess_cfg"]["resize_mode"]

    def write(**mode: str) -> Path:
        changed = config | {"preprocess_cfg": config["preprocess_cfg"] | mode}
        (folder / "open_clip_config.json").write_text(json.dumps(changed))
        return folder

    return write


@torch.no_grad()
@pytest.mark.parametrize("mode", [{"resize_mode": "squash"}, {}])
def test_clip_score_equals_open_clip(resized, mode):
    """As its config says: the small side of an image where it says nothing."""
    folder = resized(**mode)
    ours = clip_score(folder, torch.device("cpu"))(list(IMAGES.values()), PROMPTS)
    name = f"local-dir:{folder}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    images = model.eval().encode_image(torch.stack([preprocess(each) for each in SEEN.values()]))
    texts = model.encode_text(open_clip.get_tokenizer(name)(PROMPTS))
    theirs = torch.cosine_similarity(images, texts)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert theirs.std() > 1e-3


def test_a_clip_whose_images_are_made_small_in_another_way_is_refused(resized):
    with refused("asks for longest, bicubic; clip_score knows squash and shortest"):
        clip_score(resized(resize_mode="longest"), torch.device("cpu"))


@torch.no_grad()
def test_pickscore_equals_transformers_over_100(models, scorers):
    """As the model card uses it, also of a text that is too long."""
    prompts, folder = [*PROMPTS[:7], "a red circle " * 60], models / "pickscore_processor"
    ours = scorers["pickscore"](list(IMAGES.values()), prompts)
    model = CLIPModel.from_pretrained(models / "pickscore").eval()
    length = model.config.text_config.max_position_embeddings
    how = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    texts = AutoTokenizer.from_pretrained(folder)(prompts, **how)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(
        list(IMAGES.values()), return_tensors="pt"
    )
    theirs = model(**texts, **pixels).logits_per_image.diagonal() / 100
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert theirs.std() > 1e-4


def test_prompts_that_a_reward_cuts_are_counted_and_the_longest_are_named_once(scorers, capsys):
    """The tiny CLIP reads 16 tokens, start and end included, and what follows changes no score."""
    long = "a large red circle at the left " * 4
    note_cut(scorers, [PROMPTS[0], long, long])
    cut = f"cuts the rest of 1 of 2 prompts: {long[:60]!r} has 30\n"
    said = f"note: clip_score reads 16 tokens of a prompt and {cut}"
    assert capsys.readouterr().err.count(said) == 1
    note_cut(scorers, PROMPTS[:1])
    assert "note: clip_score" not in capsys.readouterr().err
