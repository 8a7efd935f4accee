"""Run the published packages hpsv2 1.2.0, image-reward 1.5 and hpsv3 1.0.0 in today's environment.

That is with today's torch, timm and transformers. Nothing here changes how a score is computed. It
replaces packages that only their training or other scorers import and names that transformers 5
has moved, and adds a file that hpsv2's wheel lacks. The packages never contact a hub: their own
classes build the models from the profile's files. They compute in float32 and get 8-bit images, as
files hold them. Of hpsv3, which is no backend, only the model is run, to compare ours with it.
"""

import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from PIL import Image

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.rewards.plain_text import COMMON, plain
from g2rpo_core.rewards.preprocess import Images, check_pairs, opaque, pil_images

# Those that the code below is written for, as in requirements-parity.lock
VERSIONS = {"hpsv2": "1.2.0", "image-reward": "1.5", "hpsv3": "1.0.0"}
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
Score = Callable[[str, Sequence[Image.Image]], Sequence[float]]  # of one prompt's images


class PackageReward:
    """A package as a reward, [N] float32. Tensors are rounded to 8 bits."""

    # rgb_first: convert images before the package gets them; hpsv2 fails on a fourth channel
    def __init__(self, score: Score, rgb_first: bool = False):
        self.score, self.rgb_first = score, rgb_first

    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:

        check_pairs(images, prompts)
        if isinstance(images, torch.Tensor):
            images = pil_images(images)
        images = [opaque(image) for image in images]
        if self.rgb_first:
            images = [image.convert("RGB") for image in images]
        scores: list[float] = []
        for prompt, part in groupby(zip(prompts, images), key=lambda pair: pair[0]):
            scores += self.score(plain(prompt, COMMON), [image for _, image in part])
        return torch.tensor(scores)


def check_installed(package: str, where: str) -> None:
    """Check a package's version; UserError with the command that installs the right one."""
    wanted = f"{package}=={VERSIONS[package]}"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed != VERSIONS[package]:
        has = f"version {installed} is installed" if installed else "it is not installed"
        raise UserError(f"{where}: {package} needs {wanted}, {has}: pip install --no-deps {wanted}")


def hpsv2(folder: Path, architecture: str, device: torch.device) -> Score:
    """Load hpsv2.img_score.score's loop, in float32, with the weights read once, not per call."""
    model, preprocess, tokenize = hpsv2_model(folder, architecture)
    model.to(device)

    @torch.no_grad()
    def score(prompt, images):
        scores = []
        for image in images:
            outputs = model(preprocess(image)[None].to(device), tokenize([prompt]).to(device))
            scores.append(
                torch.diagonal(outputs["image_features"] @ outputs["text_features"].T).item()
            )
        return scores

    return score


def image_reward(folder: Path, tokenizer: Path, device: torch.device) -> Score:
    """Load ImageReward.score: one image at a time, the prompt tokenized once."""
    (file,) = folder.glob("ImageReward.*")
    weights = read_weights(file)
    patch = weights["blip.visual_encoder.patch_embed.proj.weight"]  # [width, 3, patch, patch]
    positions = weights["blip.visual_encoder.pos_embed"].shape[1] - 1
    vision = {
        "img_size": round(positions**0.5) * patch.shape[-1],
        "patch_size": patch.shape[-1],
        "embed_dim": patch.shape[0],
        "depth": sum(
            name.startswith("blip.visual_encoder.") and name.endswith("attn.qkv.weight")
            for name in weights
        ),
        "num_heads": patch.shape[0] // 64,  # as wide as in BLIP's base and large size
    }
    hidden = weights["mlp.layers.0.weight"].shape[1]
    model = image_reward_model(
        folder / "med_config.json",
        transformers.AutoTokenizer.from_pretrained(tokenizer),
        vision,
        hidden,
    )
    model.load_state_dict(weights)
    model.to(device).device = device

    @torch.no_grad()
    def score(prompt, images):
        scores = model.score(prompt, list(images))
        return scores if isinstance(scores, list) else [scores]  # a single image's is not a list

    return score


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hide the packages' warnings, and restore what their import changes in the whole process.

    They turn all warnings off, and every log on.
    """
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers


@_undisturbed()
def hpsv2_model(folder: Path, architecture: str):
    """Load (model, preprocess, tokenize) of hpsv2 with `HPS_v2.1_compressed`.

    architecture: a name, or a file in the folder.
    """
    _place_vocabulary()
    with (
        _replace_missing("clint", "clint.textui", progress=None),
        _replace_missing("turtle", forward=None),
    ):
        from hpsv2.src.open_clip import create_model_and_transforms, factory, get_tokenizer

    # Build the model with another architecture under the only name that the package knows
    published = factory._MODEL_CONFIGS["ViT-H-14"]
    if architecture.endswith(".json"):
        factory._MODEL_CONFIGS["ViT-H-14"] = json.loads((folder / architecture).read_text())
    length = factory._MODEL_CONFIGS["ViT-H-14"]["text_cfg"]["context_length"]
    try:  # the arguments of hpsv2.img_score, in full precision
        model, _, preprocess = create_model_and_transforms(
            "ViT-H-14",
            None,
            precision="fp32",
            device="cpu",
            jit=False,
            force_quick_gelu=False,
            force_custom_text=False,
            force_patch_dropout=False,
            force_image_size=None,
            pretrained_image=False,
            image_mean=None,
            image_std=None,
            light_augmentation=True,
            aug_cfg={},
            output_dict=True,
            with_score_predictor=False,
            with_region_predictor=False,
        )
        tokenize = get_tokenizer("ViT-H-14")
    finally:
        factory._MODEL_CONFIGS["ViT-H-14"] = published
    # Weights, and texts cut to the context length
    (file,) = folder.glob("HPS_v2.1_compressed.*")
    weights = read_weights(file)
    model.load_state_dict(weights.get("state_dict", weights))
    return model.eval(), preprocess, lambda texts: tokenize(texts)[:, :length]


@_undisturbed()
def image_reward_model(med_config: Path, tokenizer, vision: dict, hidden: int):
    """Build ImageReward's own model.

    vision: sizes of its image tower (VisionTransformer's); hidden: width of its text tower.
    """
    # Names that transformers 5 has moved
    for name in ("apply_chunking_to_forward", "prune_linear_layer"):
        setattr(transformers.modeling_utils, name, getattr(transformers.pytorch_utils, name))
    transformers.modeling_utils.find_pruneable_heads_and_indices = None
    with (
        _replace_missing("clip"),
        _replace_missing("datasets", load_dataset=None),
        _replace_missing("fairscale", "fairscale.nn", "fairscale.nn.checkpoint"),
        _replace_missing("fairscale.nn.checkpoint.checkpoint_activations", checkpoint_wrapper=None),
    ):
        # Its classes hide its modules, so these are reached by name
        import ImageReward  # noqa: F401
        from ImageReward.models.BLIP import blip_pretrain, med
        from ImageReward.models.BLIP.vit import VisionTransformer

    # What transformers 5 no longer has
    base = med.BertPreTrainedModel
    base.all_tied_weights_keys = {}
    base.get_head_mask = lambda self, mask, layers, *rest: [None] * layers
    base.invert_attention_mask = lambda self, mask: (
        (1 - mask[:, None, None].float()) * torch.finfo(torch.float32).min
    )
    # The model from the profile's files, in the sizes of its weights
    blip_pretrain.init_tokenizer = lambda: tokenizer
    blip_pretrain.create_vit = lambda *published_sizes: (
        VisionTransformer(**vision),
        vision["embed_dim"],
    )
    module: Any = sys.modules["ImageReward.ImageReward"]
    head = module.MLP
    module.MLP = lambda published_width: head(hidden)
    try:
        model = module.ImageReward(str(med_config))
    finally:
        module.MLP = head
    model.preprocess = module._transform(vision["img_size"])
    return model.eval()


@_undisturbed()
def hpsv3_model(config, token: int):
    """Build HPSv3's own model, with random weights under the published names.

    config: Qwen2-VL's; token: the id of `<|Reward|>`. Called with a processor's batch, it returns
    {"logits": [N, 2]}.
    """
    # The module alone: the package's `__init__` imports what its training needs
    package: Any = ModuleType("hpsv3")
    package.__path__ = [str(importlib.metadata.distribution("hpsv3").locate_file("hpsv3"))]
    for name in (
        "DistributedTensorGatherer",
        "SequentialDistributedSampler",
        "nested_concat",
    ):  # which transformers 5 lacks
        setattr(transformers.trainer, name, getattr(transformers.trainer, name, None))
    sys.modules["hpsv3"] = package
    try:
        with (
            _replace_missing("matplotlib", "matplotlib.pyplot", "matplotlib.patches"),
            _replace_missing("datasets"),
            _replace_missing("trl", RewardTrainer=object),
        ):
            from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT
    finally:
        del sys.modules["hpsv3"]
    # The arguments of config/HPSv3_7B.yaml
    config.hidden_size = config.text_config.hidden_size
    config.pad_token_id = config.text_config.pad_token_id
    model = Qwen2VLRewardModelBT(
        config,
        output_dim=2,
        reward_token="special",
        special_token_ids=[token],
        rm_head_type="ranknet",
    )
    # The parts where transformers 4.45 had them
    model.visual = model.model.visual
    model.model = model.model.language_model
    merged = model.visual.forward
    model.visual.forward = lambda *patches, **grid: merged(*patches, **grid).pooler_output
    return model.eval()


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint, .safetensors or pickled without code, onto the CPU."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


NEEDS = {"turtle": "tkinter"}  # which some distributions leave out of Python


@contextmanager
def _replace_missing(*names: str, **attributes) -> Iterator[None]:
    """Stand empty modules in for missing packages while code that never uses them is imported.

    Also for packages that lack what they need. They are removed afterwards, because other libraries
    check whether, say, `datasets` is installed.
    """
    absent = []
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(NEEDS.get(name, name)) is None:
            absent.append(name)
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []
    if names[-1] in absent:
        vars(sys.modules[names[-1]]).update(attributes)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def _place_vocabulary() -> None:
    """Copy open_clip's vocabulary, which is the same, to where hpsv2 looks for it."""
    import open_clip

    spec = importlib.util.find_spec("hpsv2")
    file = Path(str(spec and spec.origin)).parent / "src" / "open_clip" / VOCABULARY
    if file.exists():
        return
    unfinished = file.with_name(f"{VOCABULARY}.{os.getpid()}")  # another process may do the same
    try:
        shutil.copy(Path(open_clip.__file__).parent / VOCABULARY, unfinished)
        unfinished.replace(file)
    except OSError as error:
        raise UserError(
            f"{file}: hpsv2 needs this file, which its wheel lacks, and it cannot be written: "
            f"{error.strerror}"
        ) from None
