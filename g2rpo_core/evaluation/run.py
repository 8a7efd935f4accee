"""Runs an evaluation that can resume: a file of scores per batch, and a manifest of its images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torchvision.utils import save_image

from g2rpo_core.architectures.table import read_schedule
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from g2rpo_core.evaluation.results import MEASURES, SCORES, image_folder, measure_diversity
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.files import write_whole
from g2rpo_core.foundation.manifest import find_whole, write_manifest
from g2rpo_core.foundation.progress import Bar
from g2rpo_core.foundation.tables import read_table
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.scoring import check_missing, note_cut, score_table
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.seeding import seed_of

# Columns of a batch's scores
PART = {name: holds for name, holds in SCORES.items() if name not in ("method", "seed")}
Variant = tuple[int | str, int]  # a checkpoint, and a number of steps


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of one model: what is sampled and scored, and where the parts are."""

    folder: Path
    """From `checkpoint.scratch`: a file for each batch, and in `out` the images."""
    settings: EvaluationSettings
    checkpoints: tuple[int | str, ...]
    """Those of the run; ("final",) for weights that have no others."""
    prompts: EmbeddingStore
    max_missing: Mapping[str, float]
    """For each reward, the largest share of scores that may be missing."""
    processes: ProcessGroup = ALONE
    within: Path = Path()
    """Of several evaluations with one folder: this one's folder, within that and `out`."""

    @property
    def out(self) -> Path:
        """Return the folder of the images."""
        return self.folder / "out" / self.within

    @property
    def variants(self) -> list[Variant]:
        return [(kept, steps) for kept in self.checkpoints for steps in self.settings.steps]

    @property
    def batches(self) -> range:
        return range(-(-len(self.prompts) // self.settings.batch))

    def file(self, variant: Variant, number: int) -> Path:
        """Return the file with the scores of a batch."""
        return self.folder / self.within / "{}-{}-{:05d}.parquet".format(*variant, number)

    def is_complete(self, variant: Variant, number: int) -> bool:
        """Tell whether a batch was made, is as it was written, and lacks no score.

        Scores that an interrupted run could not get are requested again.
        """
        file = self.file(variant, number)
        whole = find_whole(file.with_suffix(".json"), self.folder) is not None
        return whole and bool(read_table(file, ["score"]).score.notna().all())

    def left(self) -> dict[Variant, list[int]]:
        """Return the batches that this process still has to make."""
        mine = self.batches[self.processes.rank :: self.processes.size]
        return {
            each: [number for number in mine if not self.is_complete(each, number)]
            for each in self.variants
        }

    def bytes_left(self) -> int:
        """Return the most bytes on disk that the missing images of all processes take."""
        count = sum(map(len, self.left().values())) * self.settings.batch * self.processes.size
        return 3 * self.settings.height * self.settings.width * count

    def run(
        self,
        name: str,
        load: Callable[[int | str], Policy],
        pipeline: Path,
        rewards: Mapping[str, Reward],
        trained_share: float,
    ) -> None:
        """Sample and score the batches that are left, and wait for the other processes; collective.

        name: of the progress bar; load: makes the policy of a checkpoint; pipeline: the base
        model's folder; trained_share: as in `generate_images`. UserError if too many scores of a
        reward are missing.
        """
        self.file(self.variants[0], 0).parent.mkdir(parents=True, exist_ok=True)
        if self.processes.rank == 0:
            note_cut(rewards, (prompt.text for prompt in self.prompts.prompts))
        left, total, missing = self.left(), len(self.variants) * len(self.batches), pd.DataFrame()
        done = total - sum(map(len, left.values()))
        bar = Bar(
            total=total,
            initial=done,
            desc=f"evaluate {name}",
            unit="batch",
            disable=self.processes.rank > 0,
        )
        for kept in self.checkpoints:
            policy = load(kept)
            schedule = read_schedule(policy.architecture, pipeline, policy.image_tokens)
            for steps in self.settings.steps:
                shown = self.out / image_folder(kept, steps)
                shown.mkdir(parents=True, exist_ok=True)
                shared = (policy, self.prompts, rewards, self.settings, schedule.sigmas(steps))
                for number in left[kept, steps]:
                    prompts, images, part = evaluate_batch(*shared, number, trained_share)
                    files = [shown / f"{prompt.id}.png" for prompt in prompts]
                    for file, image in zip(files, images):
                        save_image(image, file)
                    part = part.assign(checkpoint=str(kept), steps=steps)
                    scores = self.file((kept, steps), number)
                    write_whole(scores, part.to_parquet(index=False))
                    # The manifest comes last: a batch that has one is complete
                    names = [str(file.relative_to(self.folder)) for file in (*files, scores)]
                    write_manifest(scores.with_suffix(".json"), self.folder, names)
                    missing = pd.concat([missing, part[part.score.isna()]])
                    self.stop_at_missing(missing)
                    bar.update()
        bar.close()
        self.processes.barrier()

    def table(self) -> pd.DataFrame:
        """Return the scores of all batches, columns PART; UserError if too many are missing."""
        files = [self.file(variant, number) for variant in self.variants for number in self.batches]
        table = pd.concat([read_table(file, PART) for file in files], ignore_index=True)
        self.stop_at_missing(table[table.score.isna()])
        return table

    def write(self, method: str, seed: int) -> pd.DataFrame:
        """Write `table` as that of a run beside its images; return it, with the columns SCORES."""
        table = self.table().assign(method=method, seed=seed)[[*SCORES]]
        table.to_parquet(self.out / "results.parquet", index=False)
        return table

    def stop_at_missing(self, missing: pd.DataFrame) -> None:
        """Raise UserError if a reward lacks more than its share of all scores.

        missing: the rows without a score.
        """
        total = len(self.variants) * len(self.prompts)
        for reward, rows in missing.groupby("reward") if len(missing) else ():
            check_missing(
                reward, len(rows), total, self.max_missing.get(reward, 0.0), rows.reason.iloc[0]
            )


def evaluate_batch(
    policy: Policy,
    store: EmbeddingStore,
    rewards: Mapping[str, Reward],
    settings: EvaluationSettings,
    sigmas: Sequence[float],
    number: int,
    trained_share: float,
) -> tuple[list[Prompt], torch.Tensor, pd.DataFrame]:
    """Return the prompts of batch `number`, their images [n, 3, H, W], and rows of `score_table`.

    The rows are of rewards, statistics and diversity.
    """

    def images_of(count: int, seed: int) -> tuple[list[Prompt], torch.Tensor]:
        (batch,) = generate_images(
            policy, store, count, sigmas, seed, settings.batch, [number], trained_share
        )
        return batch

    prompts, images = images_of(len(store), settings.seed)
    rows = [score_table({**rewards, **MEASURES}, prompts, images)]
    diversity = settings.diversity
    if diversity and number * settings.batch < diversity.prompts:
        drawn = [
            images_of(diversity.prompts, seed_of("diversity", settings.seed, turn))
            for turn in range(diversity.noises)
        ]
        # Of [noises, n, 3, H, W]
        distances = measure_diversity(torch.stack([images for _, images in drawn]))
        rows.append(score_table({"diversity": lambda *_: distances}, *drawn[0]))
    return prompts, images, pd.concat(rows)
