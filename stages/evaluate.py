"""Stage `evaluate`: pictures of the test prompts by one run or by the base model, and their scores."""

from pathlib import Path

import pandas as pd
from torchvision.utils import save_image
from tqdm import tqdm

from g2rpo_core import checkpoint, rewards
from g2rpo_core.embeddings import EmbeddingStore
from g2rpo_core.errors import made_by
from g2rpo_core.evaluation import pictures, score
from g2rpo_core.model_store import LOCK
from stages.common import BASE, REPORTS, arguments, run_name, sections, stage, write_json
from stages.launch import load_policy, processes

SECTIONS = ("evaluation", "sampling")


@stage
def main() -> None:
    args = arguments(__doc__, "profile", "method", "seed")
    settings = sections(args.profile, *SECTIONS)
    evaluation, sampling = settings.evaluation, settings.sampling
    world, device = processes(evaluation.processes)
    models, name = Path("models", args.profile), run_name(args.method, args.seed)
    trained = None
    if args.method != BASE[0]:
        trained = made_by(f"train@{name}", Path("runs", args.profile, name, "records.parquet")).parent
    policy = load_policy(models, evaluation, sampling, device, run=trained)
    store = EmbeddingStore(Path("embeddings", args.profile, "test"))
    scorers = rewards.load(evaluation.rewards, models, device)
    inputs = [
        models / LOCK,
        Path("embeddings", args.profile, "test"),
        *([trained / "transformer", trained / "lora"] if trained else []),
    ]
    folder = checkpoint.scratch("evaluate", f"{args.profile}/{name}", {"evaluation": evaluation, "sampling": sampling}, inputs)
    files = [folder / f"part-{number:05d}.parquet" for number in range(-(-len(store) // evaluation.batch))]
    mine = [number for number in range(world.rank, len(files), world.size) if not files[number].exists()]
    out = folder / "out"
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    made = pictures(policy, store, len(store), evaluation.steps, sampling.shift, evaluation.seed, evaluation.batch, mine)
    bar = tqdm(total=len(files), initial=len(files) - len(mine), desc=f"evaluate {name}", unit="batch", disable=world.rank > 0)
    for number, (prompts, images) in zip(mine, made):
        for prompt, image in zip(prompts, images):
            save_image(image, out / "pictures" / f"{prompt.id}.png")
        checkpoint.write_whole(files[number], score(scorers, prompts, images).to_parquet(index=False))
        bar.update()
    bar.close()
    world.barrier()
    if world.rank > 0:
        return
    table = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
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
    checkpoint.publish(out, Path("evaluations", args.profile, name))
    checkpoint.discard(folder)


if __name__ == "__main__":
    main()
