"""Run the published packages hpsv2 1.2.0 and image-reward 1.5 in today's environment.

That is with today's torch, timm and transformers. Nothing here changes how a score is computed. It
replaces packages that only their training or other scorers import and names that transformers 5
has moved, and gives hpsv2 a file that its wheel lacks. The packages never contact a hub: their own
classes build the models from the profile's files. They compute in float32 and get 8-bit images, as
files hold them.
"""

import gzip
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import transformers
from PIL import Image

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.hub.pretrained import only_file, read_weights, with_vocabulary
from g2rpo_core.rewards.plain_text import COMMON, plain
from g2rpo_core.rewards.preprocess import Images, check_pairs, pil_images
from g2rpo_core.rewards.spec import Reward

VOCABULARY = "open_clip/bpe_simple_vocab_16e6.txt.gz"
Score = Callable[[str, Image.Image], float]


def as_reward(score: Score) -> Reward:
    """Return a package as a reward, [N] float32. Tensors are rounded to 8 bits."""

    def reward(images: Images, prompts: Sequence[str]) -> torch.Tensor:
        check_pairs(images, prompts)
        return torch.tensor(
            [
                score(plain(prompt, COMMON), image)
                for prompt, image in zip(prompts, pil_images(images))
            ]
        )

    return reward


def check_installed(package: str, wanted: str, where: str) -> None:
    """Check that a package has the version for which the code below is written.

    UserError with the command that installs it.
    """
    installed = next((found.version for found in metadata.distributions(name=package)), "none")
    if installed != wanted:
        raise UserError(
            f"{where}: needs {package} {wanted}, installed is {installed}: "
            f"pip install --no-deps {package}=={wanted}"
        )


@contextmanager
def importing(*unused: str) -> Iterator[None]:
    """Import a package, with empty modules in place of those that the code here never uses.

    They are removed afterwards, because other libraries check whether, say, `datasets` is
    installed. The packages' warnings are hidden; they turn all others off, and every log on.
    """
    level, absent = logging.root.level, [name for name in unused if name not in sys.modules]
    for name in absent:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(__path__=[], __file__=None, __getattr__=lambda name: object)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.root.setLevel(level)
        for name in absent:
            del sys.modules[name]


@importing("clint", "clint.textui", "turtle")
def hpsv2(folder: Path, architecture: str, device: torch.device) -> Score:
    """Load hpsv2.img_score.score's loop, in float32, with the weights read once, not per call.

    architecture: a name, or a file in the folder.
    """
    # The wheel lacks its vocabulary, which is open_clip's
    vocabulary = metadata.distribution("open_clip_torch").locate_file(VOCABULARY)
    with patch("gzip.open", lambda file, read=gzip.open: read(str(vocabulary))):
        from hpsv2.src.open_clip import add_model_config, create_model_and_transforms, tokenize
    add_model_config(folder / architecture)  # which leaves a name without such a file alone
    # What hpsv2.img_score asks for and is no default, in full precision
    model, _, preprocess = create_model_and_transforms(
        architecture.removesuffix(".json"), light_augmentation=True, aug_cfg={}, output_dict=True
    )
    model.load_state_dict(read_weights(only_file(folder, "HPS_v2.1_compressed")))
    model.eval().to(device)
    length, (side, _) = len(model.positional_embedding), model.visual.image_size

    @torch.no_grad()
    def score(prompt: str, image: Image.Image) -> float:
        if max(image.size) == side:  # it pads only what it has resized
            left, top = ((side - edge) // 2 for edge in image.size)
            image = image.crop((-left, -top, side - left, side - top))
        outputs = model(preprocess(image)[None].to(device), tokenize([prompt], length).to(device))
        return (outputs["image_features"] @ outputs["text_features"].T).item()

    return score


def image_reward(folder: Path, tokenizer: Path, device: torch.device) -> Score:
    """Load ImageReward.score, asked about one image at a time."""
    weights = read_weights(only_file(folder, "ImageReward"))
    model = image_reward_model(
        folder / "med_config.json",
        with_vocabulary(transformers.AutoTokenizer.from_pretrained(tokenizer), tokenizer),
        image_tower(weights),
        weights["mlp.layers.0.weight"].shape[1],
    )
    model.load_state_dict(weights)
    model.to(device).device = device
    return torch.no_grad()(model.score)


def image_tower(weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the sizes of the image tower of `ImageReward.pt`: VisionTransformer's arguments."""
    patch = weights["blip.visual_encoder.patch_embed.proj.weight"]  # [width, 3, patch, patch]
    positions = weights["blip.visual_encoder.pos_embed"].shape[1] - 1
    return {
        "img_size": round(positions**0.5) * patch.shape[-1],
        "patch_size": patch.shape[-1],
        "embed_dim": patch.shape[0],
        "depth": sum(name.endswith("attn.qkv.weight") for name in weights),
        "num_heads": patch.shape[0] // 64,  # as wide as in BLIP's base and large size
    }


@importing(
    *("clip", "datasets", "fairscale", "fairscale.nn", "fairscale.nn.checkpoint"),
    "fairscale.nn.checkpoint.checkpoint_activations",
)
def image_reward_model(med_config: Path, tokenizer, vision: dict, hidden: int):
    """Build ImageReward's own model.

    vision: sizes of its image tower (VisionTransformer's); hidden: width of its text tower.
    """
    # Names that transformers 5 has moved
    for name in ("apply_chunking_to_forward", "prune_linear_layer"):
        setattr(transformers.modeling_utils, name, getattr(transformers.pytorch_utils, name))
    transformers.modeling_utils.find_pruneable_heads_and_indices = None
    from ImageReward.ImageReward import MLP, ImageReward, _transform
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
    model = ImageReward(str(med_config))
    model.mlp = MLP(hidden)
    model.preprocess = _transform(vision["img_size"])
    return model.eval()
