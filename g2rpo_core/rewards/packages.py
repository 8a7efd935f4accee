"""Run the published packages hpsv2 1.2.0 and image-reward 1.5 in today's environment.

That is with today's torch, timm and transformers. Nothing here changes how a score is computed. It
replaces packages that only their training or other scorers import and names that transformers 5
has moved, and adds a file that hpsv2's wheel lacks. The packages never contact a hub: their own
classes build the models from the profile's files. They compute in float32 and get 8-bit images, as
files hold them.
"""

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import write_whole
from g2rpo_core.rewards.plain_text import COMMON, plain
from g2rpo_core.rewards.preprocess import Images, check_pairs, opaque, pil_images
from g2rpo_core.rewards.spec import Reward

# Those that the code below is written for, as in requirements-parity.lock
VERSIONS = {"hpsv2": "1.2.0", "image-reward": "1.5"}
Score = Callable[[str, Sequence[Image.Image]], Sequence[float]]  # of one prompt's images


def as_reward(score: Score) -> Reward:
    """Return a package as a reward, [N] float32. Tensors are rounded to 8 bits."""

    def reward(images: Images, prompts: Sequence[str]) -> torch.Tensor:
        check_pairs(images, prompts)
        files = pil_images(images) if isinstance(images, torch.Tensor) else map(opaque, images)
        scores: list[float] = []
        for prompt, part in groupby(zip(prompts, files), key=lambda pair: pair[0]):
            scores += score(plain(prompt, COMMON), [image for _, image in part])
        return torch.tensor(scores)

    return reward


def check_installed(package: str, where: str) -> None:
    """Check a package's version; UserError with the command that installs the right one."""
    wanted = VERSIONS[package]
    installed = next((found.version for found in metadata.distributions(name=package)), None)
    if installed != wanted:
        has = f"version {installed} is installed" if installed else "it is not installed"
        wanted = f"{package}=={wanted}"
        raise UserError(f"{where}: {package} needs {wanted}, {has}: pip install --no-deps {wanted}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hide the packages' warnings, and restore what their import changes in the whole process.

    They turn all warnings off, and every log on.
    """
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    with warnings.catch_warnings(action="ignore"):
        try:
            yield
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers


@contextmanager
def replace_missing(*names: str) -> Iterator[None]:
    """Stand empty modules in for missing packages while code that never uses them is imported.

    Also for `turtle`, which needs a tkinter that some distributions leave out of Python. They are
    removed afterwards, because other libraries check whether, say, `datasets` is installed.
    """
    needs = lambda name: "tkinter" if name == "turtle" else name.partition(".")[0]
    absent = [name for name in names if name not in sys.modules and not find_spec(needs(name))]
    for name in absent:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(__path__=[], __file__=None, __getattr__=lambda name: object)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@undisturbed()
def hpsv2(folder: Path, architecture: str, device: torch.device) -> Score:
    """Load hpsv2.img_score.score's loop, in float32, with the weights read once, not per call.

    architecture: a name, or a file in the folder.
    """
    _place_vocabulary()
    with replace_missing("clint", "clint.textui", "turtle"):
        from hpsv2.src.open_clip import create_model_and_transforms, factory, tokenize
    name = architecture.removesuffix(".json")
    if name != architecture:
        factory._MODEL_CONFIGS[name] = json.loads((folder / architecture).read_text())
    # What hpsv2.img_score asks for and is no default, in full precision
    model, _, preprocess = create_model_and_transforms(
        name, light_augmentation=True, aug_cfg={}, output_dict=True
    )
    (file,) = folder.glob("HPS_v2.1_compressed.*")
    weights = read_weights(file)
    model.load_state_dict(weights.get("state_dict", weights))
    model.eval().to(device)
    length, (side, _) = len(model.positional_embedding), model.visual.image_size

    @torch.no_grad()
    def score(prompt: str, images: Sequence[Image.Image]) -> list[float]:
        text, scores = tokenize([prompt], length).to(device), []
        for image in images:
            image = image.convert("RGB")  # it fails on a fourth channel
            if max(image.size) == side:  # it pads only what it has resized
                square = Image.new("RGB", (side, side))
                square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
                image = square
            outputs = model(preprocess(image)[None].to(device), text)
            scores.append((outputs["image_features"] @ outputs["text_features"].T).item())
        return scores

    return score


def _place_vocabulary() -> None:
    """Copy open_clip's vocabulary, which is the same, to where hpsv2 looks for it."""
    import open_clip

    vocabulary = Path(open_clip.__file__).with_name("bpe_simple_vocab_16e6.txt.gz")
    package = Path(str(metadata.distribution("hpsv2").locate_file("hpsv2")))
    file = package / "src" / "open_clip" / vocabulary.name
    try:
        if not file.exists():
            write_whole(file, vocabulary.read_bytes())
    except OSError as error:
        raise UserError(
            f"{file}: hpsv2 needs this file, which its wheel lacks, and it cannot be written: "
            f"{error.strerror}"
        ) from None


def image_reward(folder: Path, tokenizer: Path, device: torch.device) -> Score:
    """Load ImageReward.score, asked about one image at a time."""
    (file,) = folder.glob("ImageReward.*")
    weights = read_weights(file)
    patch = weights["blip.visual_encoder.patch_embed.proj.weight"]  # [width, 3, patch, patch]
    positions = weights["blip.visual_encoder.pos_embed"].shape[1] - 1
    blocks = [name for name in weights if name.endswith("attn.qkv.weight")]
    vision = {
        "img_size": round(positions**0.5) * patch.shape[-1],
        "patch_size": patch.shape[-1],
        "embed_dim": patch.shape[0],
        "depth": sum(name.startswith("blip.visual_encoder.") for name in blocks),
        "num_heads": patch.shape[0] // 64,  # as wide as in BLIP's base and large size
    }
    model = image_reward_model(
        folder / "med_config.json",
        transformers.AutoTokenizer.from_pretrained(tokenizer),
        vision,
        weights["mlp.layers.0.weight"].shape[1],
    )
    model.load_state_dict(weights)
    model.to(device).device = device
    score = torch.no_grad()(model.score)
    return lambda prompt, images: [score(prompt, image) for image in images]


@undisturbed()
def image_reward_model(med_config: Path, tokenizer, vision: dict, hidden: int):
    """Build ImageReward's own model.

    vision: sizes of its image tower (VisionTransformer's); hidden: width of its text tower.
    """
    # Names that transformers 5 has moved
    for name in ("apply_chunking_to_forward", "prune_linear_layer"):
        setattr(transformers.modeling_utils, name, getattr(transformers.pytorch_utils, name))
    transformers.modeling_utils.find_pruneable_heads_and_indices = None
    checkpoints = [f"fairscale{rest}" for rest in ("", ".nn", ".nn.checkpoint")]
    unused = ("clip", "datasets", *checkpoints, f"{checkpoints[-1]}.checkpoint_activations")
    with replace_missing(*unused):
        # Its classes hide its modules, so these are reached by name
        import ImageReward  # noqa: F401
        from ImageReward.models.BLIP import blip_pretrain, med, vit
    # What transformers 5 no longer has
    base = med.BertPreTrainedModel
    base.all_tied_weights_keys = {}
    base.get_head_mask = lambda self, mask, layers, *rest: [None] * layers
    base.invert_attention_mask = lambda self, mask: (
        (1 - mask[:, None, None].float()) * torch.finfo(torch.float32).min
    )
    # The model from the profile's files, in the sizes of its weights
    tower = vit.VisionTransformer(**vision), vision["embed_dim"]
    blip_pretrain.init_tokenizer = lambda: tokenizer
    blip_pretrain.create_vit = lambda *published_sizes: tower
    module: Any = sys.modules["ImageReward.ImageReward"]
    model = module.ImageReward(str(med_config))
    model.mlp = module.MLP(hidden)
    model.preprocess = module._transform(vision["img_size"])
    return model.eval()


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint, .safetensors or pickled without code, onto the CPU."""
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
