"""Stage `evaluate`: pictures of the test prompts by one run or by the base model, and their scores."""

from pathlib import Path

import pandas as pd
import torch
from torchvision.utils import save_image
from tqdm import tqdm

from g2rpo_core import rewards
from g2rpo_core.embeddings import DTYPES, EmbeddingStore
from g2rpo_core.errors import made_by
from g2rpo_core.evaluation import pictures, score
from g2rpo_core.model_store import ModelStore
from g2rpo_core.policy import Policy
from stages.common import BASE, REPORTS, arguments, fresh, run_name, sections, stage, write_json

SECTIONS = ("evaluation", "sampling")


@stage
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed")
    settings = sections(args.profile, *SECTIONS)
    evaluation, sampling = settings.evaluation, settings.sampling
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models, name = Path("models", args.profile), run_name(args.method, args.seed)
    trained = None
    if args.method != BASE[0]:
        trained = made_by(f"train@{name}", Path("runs", args.profile, name, "records.parquet")).parent
    policy = Policy.load(
        ModelStore(models).folder("pipeline"), trained,
        height=evaluation.height, width=evaluation.width, guidance=sampling.guidance, dtype=DTYPES[sampling.dtype], device=device,
    )  # fmt: skip
    store = EmbeddingStore(Path("embeddings", args.profile, "test"))
    scorers = rewards.load(evaluation.rewards, models, device)
    out = fresh(Path("evaluations", args.profile, name))
    (out / "pictures").mkdir()
    tables = []
    with tqdm(total=len(store), desc=f"evaluate {name}", unit="picture", mininterval=2) as bar:
        for prompts, images in pictures(
            policy, store, len(store), evaluation.steps, sampling.shift, evaluation.seed, evaluation.batch
        ):
            for prompt, image in zip(prompts, images):
                save_image(image, out / "pictures" / f"{prompt.id}.png")
            tables.append(score(scorers, prompts, images))
            bar.update(len(prompts))
    table = pd.concat(tables, ignore_index=True)
    for column, value in (
        ("steps", evaluation.steps),
        ("checkpoint", "final"),
        ("seed", int(args.seed)),
        ("method", args.method),
    ):
        table.insert(0, column, value)
    table.to_parquet(out / "results.parquet", index=False)
    means = table.groupby("reward", sort=False).score.mean()
    write_json(REPORTS / "metrics" / "evaluate" / f"{name}.json", {reward: float(means[reward]) for reward in evaluation.rewards})


if __name__ == "__main__":
    main()
