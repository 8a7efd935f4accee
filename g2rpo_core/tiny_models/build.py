"""Builds and trains every model of a profile whose models are made here, such as `tiny`, in two processes of one thread each.

The pipeline (VAE, then transformer with text encoders) and each scorer need nothing of each other. On small models two
processes of one thread beat one of two threads, and one thread sums in one order: the same weights every time.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from g2rpo_core.common.model_store import describe_files
from g2rpo_core.common.processes import die_with_parent
from g2rpo_core.common.seeding import seed_of
from g2rpo_core.tiny_models.settings import BuiltModels, FitSettings
from g2rpo_core.worlds.table import WORLDS
from g2rpo_core.worlds.world import World

CPU = torch.device("cpu")


def build_models(root: Path, settings: BuiltModels) -> tuple[dict, dict]:
    """Writes the pipeline's folder and those of the scorers below `root`; their lock entries, and what the training reached."""
    from g2rpo_core.tiny_models.clip import HPS_ARCHITECTURE

    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=_start) as pool:
        tasks = [pool.submit(build_pipeline, root, settings)]
        tasks += [pool.submit(build_scorer, root, settings, name) for name in BUILDERS if settings.fit_of(name)]
        quality = {name: value for task in tasks for name, value in task.result().items()}
    entries = {folder.name: {"folder": folder.name, "files": describe_files(folder)} for folder in sorted(root.iterdir())}
    if "hps" in entries:
        entries["hps"]["architecture"] = HPS_ARCHITECTURE
    return entries, quality


def _start() -> None:
    torch.set_num_threads(1)
    die_with_parent()  # it would go on until its task is done, and the next build would meet its files


def build_pipeline(root: Path, settings: BuiltModels) -> dict:
    """The folder `pipeline`; what the training reached."""
    from g2rpo_core.tiny_models.flux import TinyFlux
    from g2rpo_core.tiny_models.pipeline import Small, train_pipeline, train_vae
    from g2rpo_core.tiny_models.sd3 import TinyStableDiffusion3

    world = WORLDS[settings.source]
    scenes, pictures = world.sample(settings.images, seed_of("pictures", settings.seed), testing=False)
    images = torch.from_numpy(pictures) * 2 - 1
    vae, vae_quality = train_vae(images, settings.vae, settings.seed)
    builders: dict[str, Callable[[World, list[str]], Small]] = {"flux": TinyFlux, "sd3": TinyStableDiffusion3}
    captions = [scene.caption for scene in scenes]
    pipeline, quality = train_pipeline(builders[settings.base], world, vae, captions, images, settings.fit_of_base, settings.seed)
    pipeline.save_pretrained(root / "pipeline")
    return {"vae": vae_quality, settings.base: quality}


def build_scorer(root: Path, settings: BuiltModels, name: str) -> dict:
    """The folders of one of BUILDERS; what the training reached, and how often it is right, read back from its files."""
    from g2rpo_core.tiny_models.clip import scorer_quality

    world, how = WORLDS[settings.source], settings.fit_of(name)
    assert how is not None  # as checked
    scorer, quality = BUILDERS[name](root, world, how, seed_of(name, settings.seed) % 2**32)
    return {name: quality | scorer_quality(scorer, world)}


def _hps(root: Path, world: World, how: FitSettings, seed: int) -> tuple[Callable, dict]:
    from g2rpo_core.rewards.hps import hps
    from g2rpo_core.tiny_models.clip import HPS_ARCHITECTURE, open_clip_towers, save_hps, train_towers

    model, quality = train_towers(open_clip_towers, world, how, seed, "hps", preferences=True)
    save_hps(model, world, root / "hps")
    return hps(root / "hps", CPU, HPS_ARCHITECTURE), quality


def _clip_score(root: Path, world: World, how: FitSettings, seed: int) -> tuple[Callable, dict]:
    from g2rpo_core.rewards.clip_score import clip_score
    from g2rpo_core.tiny_models.clip import open_clip_towers, save_clip_score, train_towers

    model, quality = train_towers(open_clip_towers, world, how, seed, "clip score", preferences=False)
    save_clip_score(model, world, root / "clip_score")
    return clip_score(root / "clip_score", CPU), quality


def _pickscore(root: Path, world: World, how: FitSettings, seed: int) -> tuple[Callable, dict]:
    from g2rpo_core.rewards.pickscore import pickscore
    from g2rpo_core.tiny_models.clip import save_pickscore, save_pickscore_processor, train_towers, transformers_towers

    model, quality = train_towers(transformers_towers, world, how, seed, "pickscore", preferences=True)
    save_pickscore(model, root / "pickscore")
    save_pickscore_processor(world, root / "pickscore_processor")
    return pickscore(root / "pickscore", root / "pickscore_processor", CPU), quality


def _image_reward(root: Path, world: World, how: FitSettings, seed: int) -> tuple[Callable, dict]:
    from g2rpo_core.rewards.image_reward import image_reward
    from g2rpo_core.tiny_models.image_reward import save_image_reward, train_image_reward

    model, quality = train_image_reward(world, how, seed)
    save_image_reward(model, world, root / "image_reward", root / "image_reward_tokenizer")
    return image_reward(root / "image_reward", root / "image_reward_tokenizer", CPU), quality


def _unified_reward(root: Path, world: World, how: FitSettings, seed: int) -> tuple[Callable, dict]:
    from g2rpo_core.rewards.unified_reward import UnifiedRewardSettings, unified_reward
    from g2rpo_core.tiny_models.unified_reward import TEMPLATE, save_vlm, train_vlm

    vlm, processor, quality = train_vlm(world, how, seed)
    save_vlm(vlm, processor, root / "unified_reward")
    answers = UnifiedRewardSettings(template=TEMPLATE, micro_batch=128, max_new_tokens=32)
    return unified_reward(lambda: root / "unified_reward", CPU, answers), quality


BUILDERS: dict[str, Callable[[Path, World, FitSettings, int], tuple[Callable, dict]]] = {
    "image_reward": _image_reward,
    "hps": _hps,
    "unified_reward": _unified_reward,
    "clip_score": _clip_score,
    "pickscore": _pickscore,
}
