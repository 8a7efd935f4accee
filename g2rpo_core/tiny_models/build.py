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
from g2rpo_core.common.seeding import seed_of
from g2rpo_core.shapes.scenes import sample
from g2rpo_core.tiny_models.settings import ShapesModels

CPU = torch.device("cpu")


def build_models(root: Path, settings: ShapesModels) -> tuple[dict, dict]:
    """Writes the pipeline's folder and those of the scorers below `root`; their lock entries, and what the training reached."""
    from g2rpo_core.tiny_models.clip import HPS_ARCHITECTURE

    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        works = (_pipeline, _image_reward, _hps, _unified_reward, _clip_score, _pickscore)
        tasks = [pool.submit(work, root, settings) for work in works]
        quality = {name: value for task in tasks for name, value in task.result().items()}
    entries = {folder.name: {"folder": folder.name, "files": describe_files(folder)} for folder in sorted(root.iterdir())}
    entries["hps"]["architecture"] = HPS_ARCHITECTURE
    return entries, quality


def _pipeline(root: Path, settings: ShapesModels) -> dict:
    from g2rpo_core.tiny_models.flux import TinyFlux
    from g2rpo_core.tiny_models.pipeline import Small, train_pipeline, train_vae
    from g2rpo_core.tiny_models.sd3 import TinyStableDiffusion3

    scenes, images = sample(settings.images, seed_of("pictures", settings.seed), testing=False)
    images = torch.from_numpy(images) * 2 - 1
    vae, vae_quality = train_vae(images, settings.vae, settings.seed)
    builders: dict[str, Callable[[list[str]], Small]] = {"flux": TinyFlux, "sd3": TinyStableDiffusion3}
    pipeline, quality = train_pipeline(builders[settings.base], vae, scenes, images, settings.fit_of_base, settings.seed)
    pipeline.save_pretrained(root / "pipeline")
    return {"vae": vae_quality, settings.base: quality}


def _hps(root: Path, settings: ShapesModels) -> dict:
    from g2rpo_core.rewards.hps import hps
    from g2rpo_core.tiny_models.clip import HPS_ARCHITECTURE, open_clip_towers, save_hps, train_towers

    model, quality = train_towers(open_clip_towers, settings.hps, _seed("hps", settings), "hps", preferences=True)
    save_hps(model, root / "hps")
    return {"hps": quality | _accuracy(hps(root / "hps", CPU, HPS_ARCHITECTURE))}


def _clip_score(root: Path, settings: ShapesModels) -> dict:
    from g2rpo_core.rewards.clip_score import clip_score
    from g2rpo_core.tiny_models.clip import open_clip_towers, save_clip_score, train_towers

    seed = _seed("clip_score", settings)
    model, quality = train_towers(open_clip_towers, settings.clip_score, seed, "clip score", preferences=False)
    save_clip_score(model, root / "clip_score")
    return {"clip_score": quality | _accuracy(clip_score(root / "clip_score", CPU))}


def _pickscore(root: Path, settings: ShapesModels) -> dict:
    from g2rpo_core.rewards.pickscore import pickscore
    from g2rpo_core.tiny_models.clip import save_pickscore, save_pickscore_processor, train_towers, transformers_towers

    seed = _seed("pickscore", settings)
    model, quality = train_towers(transformers_towers, settings.pickscore, seed, "pickscore", preferences=True)
    save_pickscore(model, root / "pickscore")
    save_pickscore_processor(root / "pickscore_processor")
    return {"pickscore": quality | _accuracy(pickscore(root / "pickscore", root / "pickscore_processor", CPU))}


def _image_reward(root: Path, settings: ShapesModels) -> dict:
    from g2rpo_core.rewards.image_reward import image_reward
    from g2rpo_core.tiny_models.image_reward import save_image_reward, train_image_reward

    seed = _seed("image_reward", settings)
    model, quality = train_image_reward(settings.image_reward, seed)
    save_image_reward(model, root / "image_reward", root / "image_reward_tokenizer")
    return {"image_reward": quality | _accuracy(image_reward(root / "image_reward", root / "image_reward_tokenizer", CPU))}


def _unified_reward(root: Path, settings: ShapesModels) -> dict:
    from g2rpo_core.rewards.unified_reward import UnifiedRewardSettings, unified_reward
    from g2rpo_core.tiny_models.unified_reward import TEMPLATE, save_vlm, train_vlm

    vlm, processor, quality = train_vlm(settings.unified_reward, _seed("unified_reward", settings))
    save_vlm(vlm, processor, root / "unified_reward")
    how = UnifiedRewardSettings(template=TEMPLATE, micro_batch=128, max_new_tokens=32)
    return {"unified_reward": quality | _accuracy(unified_reward(lambda: root / "unified_reward", CPU, how))}


def _seed(name: str, settings: ShapesModels) -> int:
    return seed_of(name, settings.seed) % 2**32


def _accuracy(scorer) -> dict:
    """Read back from its files: what was saved is what is measured."""
    from g2rpo_core.tiny_models.clip import scorer_quality

    return scorer_quality(scorer)
