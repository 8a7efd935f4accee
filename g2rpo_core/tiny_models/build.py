"""Build and train every model of a profile such as `tiny`, in two processes of one thread each.

The pipeline (VAE, then transformer with text encoders) and the scorers do not depend on each other.
On small models two processes of one thread beat one of two threads, and one thread sums in one
order: the same weights every time.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import NamedTuple

import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.manifest import describe_files, find_whole, write_manifest
from g2rpo_core.foundation.permissions import share_weights
from g2rpo_core.foundation.texts import echo
from g2rpo_core.numerics.cuda import prepare, why_none
from g2rpo_core.numerics.parent import die_with_parent
from g2rpo_core.numerics.pins import Numerics
from g2rpo_core.numerics.portable import in_use, use
from g2rpo_core.rewards.image_reward import image_reward
from g2rpo_core.rewards.similarity import clip_score, hps, pickscore
from g2rpo_core.rewards.unified_reward import UnifiedRewardSettings, unified_reward
from g2rpo_core.sampling.seeding import seed_of
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.tasks.task import Task
from g2rpo_core.tiny_models.clip import (
    HPS_ARCHITECTURE,
    SCENES,
    open_clip_towers,
    save_clip_score,
    save_hps,
    save_pickscore_processor,
    scorer_quality,
    train_towers,
    transformers_towers,
)
from g2rpo_core.tiny_models.image_reward import save_image_reward, train_image_reward
from g2rpo_core.tiny_models.language import TinyFlux2, TinyQwenImage, TinyZImage
from g2rpo_core.tiny_models.pipeline import (
    TinyBase,
    TinyFlux,
    TinyStableDiffusion3,
    train_pipeline,
    train_vae,
)
from g2rpo_core.tiny_models.settings import BuiltModels, FitSettings, TowerSize
from g2rpo_core.tiny_models.unified_reward import TEMPLATE, train_vlm

CPU = torch.device("cpu")
PIPELINE = "pipeline"  # the base model, among the names of scorers
TWINS: dict[str, type[TinyBase]] = {
    "flux": TinyFlux,
    "sd3": TinyStableDiffusion3,
    "flux2": TinyFlux2,
    "zimage": TinyZImage,
    "qwen_image": TinyQwenImage,
}


class Scorer(NamedTuple):
    """What decides a scorer that is trained."""

    task: Task
    fit: FitSettings
    seed: int
    scenes: int
    size: TowerSize
    """Of CLIP's image tower."""
    device: torch.device
    """To train a CLIP on; the others are trained on the CPU."""


def fit_device(settings: BuiltModels) -> torch.device:
    """Return the device that models are trained on; UserError if it is a GPU and there is none.

    On a GPU float32 products are made of TF32 ones from now on.
    """
    if settings.device == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise UserError(
            f"models.device: gpu: torch finds no GPU here: {why_none()}; "
            "else choose a profile for a CPU"
        )
    torch.set_float32_matmul_precision("high")
    return prepare(torch.device("cuda"))


def build_models(root: Path, settings: BuiltModels, parts: Path) -> tuple[dict, dict]:
    """Write the pipeline's and the scorers' folders below `root`; return lock entries and quality.

    parts: where each model waits until all are built. What an earlier call with equal settings left
    there is used again.
    """
    fit_device(settings)  # refused before anything is built
    names = [PIPELINE, *(name for name in BUILDERS if settings.fit_of(name))]
    with ProcessPoolExecutor(
        2, mp_context=get_context("spawn"), initializer=_start, initargs=(in_use(),)
    ) as pool:
        jobs = [pool.submit(_build, parts / name, settings, name) for name in names]
        try:
            quality = {name: value for job in jobs for name, value in job.result().items()}
        except BaseException:  # the pool would wait until what is running has been trained
            for worker in active_children():
                worker.terminate()
            raise
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        for folder in sorted((parts / name).iterdir()):
            shutil.move(folder, root)
    shutil.rmtree(parts)
    return describe_models(root), quality


def _build(part: Path, settings: BuiltModels, name: str) -> dict:
    """Build one model into the folder `part`, unless it is there, whole; return its quality."""
    known = part.with_name(f"{name}.json")
    if about := find_whole(known, part):
        echo(f"{name}: built before the last call was stopped, so it is used")
        return dict(about)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    quality = (
        build_pipeline(part, settings) if name == PIPELINE else build_scorer(part, settings, name)
    )
    share_weights(part)
    write_manifest(known, part, about=quality)
    return quality


def describe_models(root: Path) -> dict[str, dict]:
    """Return the lock entries of the models that were built below `root`."""
    entries: dict[str, dict] = {
        folder.name: {"folder": folder.name, "files": describe_files(folder)}
        for folder in sorted(root.iterdir())
    }
    if "hps" in entries:
        entries["hps"]["architecture"] = HPS_ARCHITECTURE
    return entries


def _start(numerics: Numerics) -> None:
    use(numerics)
    torch.set_num_threads(1)
    # an orphan would train on, and write into the folders of the next build
    parent = parent_process()
    die_with_parent(parent.pid if parent else None)


def maker_of(settings: BuiltModels) -> Callable[[Task, list[str]], TinyBase]:
    """Return what makes the untrained base model for captions of a task."""
    twin = TWINS[settings.base]
    return partial(TinyFlux, size=settings.sizes.transformer) if twin is TinyFlux else twin


def build_pipeline(root: Path, settings: BuiltModels) -> dict:
    """Train the base model into the folder `pipeline` below `root`; return its losses."""
    task = TASKS[settings.source]
    scenes, drawn = task.sample(settings.images, seed_of("pictures", settings.seed), testing=False)
    images = torch.from_numpy(drawn).to(fit_device(settings)) * 2 - 1
    twin, build = TWINS[settings.base], maker_of(settings)
    vae, vae_quality = train_vae(images, settings.vae, settings.seed, twin.vae, settings.sizes.vae)
    captions, fit = [scene.caption for scene in scenes], settings.fit_of(settings.base)
    assert fit is not None  # as BuiltModels checks
    pipeline, quality = train_pipeline(build, task, vae, captions, images, fit, settings.seed)
    pipeline.to("cpu").save_pretrained(root / PIPELINE)
    return {"vae": vae_quality, settings.base: quality}


def build_scorer(root: Path, settings: BuiltModels, name: str) -> dict:
    """Train one scorer of BUILDERS into its folders; return its loss and its accuracy.

    Accuracy is measured with the weights read back from the files.
    """
    task, fit = TASKS[settings.source], settings.fit_of(name)
    assert fit is not None  # `build_models` asks for no other
    how = Scorer(
        task,
        fit,
        seed_of(name, settings.seed) % 2**32,
        min(SCENES, settings.images),
        settings.sizes.scorers,
        fit_device(settings),
    )
    scorer, quality = BUILDERS[name](root, how)
    return {name: quality | scorer_quality(scorer, task, min(512, settings.images))}


def _hps(root: Path, how: Scorer) -> tuple[Callable, dict]:
    model, quality = train_towers(
        open_clip_towers, *how[:4], "hps", how.size, how.device, preferences=True
    )
    save_hps(model, how.task, how.size, root / "hps")
    return hps(root / "hps", CPU, HPS_ARCHITECTURE), quality


def _clip_score(root: Path, how: Scorer) -> tuple[Callable, dict]:
    model, quality = train_towers(
        open_clip_towers, *how[:4], "clip score", how.size, how.device, preferences=False
    )
    save_clip_score(model, how.task, how.size, root / "clip_score")
    return clip_score(root / "clip_score", CPU), quality


def _pickscore(root: Path, how: Scorer) -> tuple[Callable, dict]:
    model, quality = train_towers(
        transformers_towers, *how[:4], "pickscore", how.size, how.device, preferences=True
    )
    model.save_pretrained(root / "pickscore")
    save_pickscore_processor(how.task, root / "pickscore_processor")
    return pickscore(root / "pickscore", root / "pickscore_processor", CPU), quality


def _image_reward(root: Path, how: Scorer) -> tuple[Callable, dict]:
    model, quality = train_image_reward(*how[:4])
    save_image_reward(model, how.task, root / "image_reward", root / "image_reward_tokenizer")
    return image_reward(root / "image_reward", root / "image_reward_tokenizer", CPU), quality


def _unified_reward(root: Path, how: Scorer) -> tuple[Callable, dict]:
    vlm, processor, quality = train_vlm(*how[:4])
    for part in (vlm, processor):
        part.save_pretrained(root / "unified_reward")
    answers = UnifiedRewardSettings(template=TEMPLATE, micro_batch=128, max_new_tokens=32)
    return unified_reward(lambda: root / "unified_reward", CPU, answers), quality


BUILDERS: dict[str, Callable[[Path, Scorer], tuple[Callable, dict]]] = {
    "image_reward": _image_reward,
    "hps": _hps,
    "unified_reward": _unified_reward,
    "clip_score": _clip_score,
    "pickscore": _pickscore,
}
