"""Builds and trains every model of profile `tiny`, in two processes of one thread each.

The pipeline (VAE, then FLUX with its text encoders) and the scorers need nothing of each other. On small models two
processes of one thread beat one of two threads, and one thread sums in one order: the same weights every time.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from ..config import ShapesModels
from ..model_store import describe_files
from ..randomness import seed_of
from .scenes import sample


def build_models(root: Path, settings: ShapesModels) -> tuple[dict, dict]:
    """Writes pipeline/, clip_score/ and hps/ below `root`; their lock entries, and what the training reached."""
    from .scorers import HPS_ARCHITECTURE

    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        tasks = [pool.submit(work, root, settings) for work in (_pipeline, _scorers)]
        quality = {name: value for task in tasks for name, value in task.result().items()}
    entries = {name: {"folder": name, "files": describe_files(root / name)} for name in ("pipeline", "clip_score", "hps")}
    entries["hps"]["architecture"] = HPS_ARCHITECTURE
    return entries, quality


def _pipeline(root: Path, settings: ShapesModels) -> dict:
    from .generator import train_flux, train_vae

    scenes, pictures = sample(settings.pictures, seed_of("pictures", settings.seed), testing=False)
    pictures = torch.from_numpy(pictures) * 2 - 1
    vae, vae_quality = train_vae(pictures, settings.vae, settings.seed)
    pipeline, flux_quality = train_flux(vae, scenes, pictures, settings.flux, settings.seed)
    pipeline.save_pretrained(root / "pipeline")
    return {"vae": vae_quality, "flux": flux_quality}


def _scorers(root: Path, settings: ShapesModels) -> dict:
    from ..rewards.open_clip import clip_score, hps
    from .scorers import HPS_ARCHITECTURE, save_clip_score, save_hps, scorer_quality, train_clip

    quality = {}
    for name, how, save, load in (
        ("clip_score", settings.clip_score, save_clip_score, clip_score),
        ("hps", settings.hps, save_hps, partial(hps, architecture=HPS_ARCHITECTURE)),
    ):
        model, quality[name] = train_clip(how, seed_of(name, settings.seed) % 2**32, preferences=name == "hps")
        save(model, root / name)
        quality[name] |= scorer_quality(load(root / name, device=torch.device("cpu")))
    return quality
