"""A process that starts real training processes (forked after the imports), kills them at given moments, and starts them again.

Called with a folder (models, embeddings), the number of processes, perhaps one of KINDS, and the moments in seconds (`write`: while a checkpoint is
written); prints one JSON line with what each attempt ended by. The weights and records of every process land in the folder.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from g2rpo_core import checkpoint
from g2rpo_core.config import Adapter, ParallelSettings, load_profile
from g2rpo_core.embeddings import EmbeddingStore
from g2rpo_core.evaluation import heldout_means, pictures
from g2rpo_core.methods import METHODS, Window
from g2rpo_core.policy import Policy
from g2rpo_core.termination import STATUS, Terminated, Termination
from g2rpo_core.trainer import Trainer
from g2rpo_core.training import train
from g2rpo_core.world import World

ROOT = Path(__file__).parents[1]
ITERATIONS = 8
KINDS = ("hybrid", "adapter")  # of worlds: weights sharded in groups of 2 with a replica for rollouts; a LoRA alone trained


def redness(images, prompts):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def member(folder: Path, policy: Policy, rank: int, size: int, attempt: str, prompts: int) -> None:
    """One process of the run, from its start or its last checkpoint to the end."""
    termination = Termination().watch()
    world, name = World(rank, size), attempt.split("-")[0]
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{attempt}", rank=rank, world_size=size)
        policy.parallelize(ParallelSettings(shard_size=2, replica=True) if name == "hybrid" else ParallelSettings(), world)
    profile = load_profile(ROOT / "profiles" / "tiny.yaml")
    sampling = profile.sampling.model_copy(update={"steps": 5, "batch_tokens": 1024, "decode_batch": 8})
    monitor = profile.training.monitor.model_copy(update={"every": 3, "rewards": ("redness",)})
    changes = {
        "iterations": ITERATIONS if prompts == 2 else 2,
        "prompts_per_iteration": prompts,
        "group_size": 2,
        "batch_tokens": 1024,
        "rewards": {"redness": 1.0},
    }
    training = profile.training.model_copy(update=changes | {"monitor": monitor, "learning_rate": 1e-3})
    training = training.model_copy(update={"checkpoints": training.checkpoints.model_copy(update={"every": 1, "keep": 2})})
    method = METHODS["mix_grpo"].model_copy(update={"window": Window(size=2, order="progressive", every=2), "updates": 2})
    store, scorers = EmbeddingStore(folder / "embeddings"), {"redness": redness}
    trainer = Trainer(policy, method, sampling, training, store, scorers, 1, world, termination)
    heldout = lambda: heldout_means(policy, store, scorers, 8, sampling, world)
    os.chdir(folder)
    scratch = checkpoint.scratch(
        "train", "killed", {"training": training, "kind": name if name in KINDS else "world"}, [folder / "embeddings"], world
    )
    try:
        records = train(trainer, scratch, heldout, lambda record: None)
    except Terminated:
        os._exit(STATUS)
    shown = torch.cat([images for _, images in pictures(policy, store, 4, 5, 3.0, 9, 4)])
    whole = lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    gradients = [whole(parameter.grad) for parameter in trainer.parameters if parameter.grad is not None]
    weights = [whole(parameter.detach()) for parameter in trainer.parameters]
    end = {"state": trainer.state(), "pictures": shown, "records": records, "weights": weights, "gradients": gradients}
    torch.save(end, folder / f"end-{attempt}-{rank}.pt")


class EndedFirst(Exception):
    """A run ended before it could be killed."""


def attempt(
    folder: Path, policy: Policy, size: int, name: str, moment: float | str | None, number: int = signal.SIGKILL, prompts: int = 2
) -> dict:
    """Starts all processes, kills one of them at the moment and then the rest, as a launcher does: what they ended by."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                member(folder, policy, rank, size, name, prompts)
            except BaseException as error:  # noqa: BLE001 - a forked process ends here whatever happens
                traceback.print_exception(error)
                os._exit(1)
            os._exit(0)
        children.append(child)
    if moment is not None:
        start, caught = time.monotonic(), False
        while not caught and (moment == "write" or time.monotonic() < start + moment):
            if os.waitpid(children[0], os.WNOHANG)[0]:
                for child in children[1:]:
                    os.waitpid(child, 0)
                raise EndedFirst
            if moment == "write":
                caught = any(folder.glob(".cache/resume/train/killed/*/iteration-*.tmp"))
            time.sleep(0.0005 if moment == "write" else 0.01)
        victims = [random.Random(name).choice(children)] if number == signal.SIGKILL else children
        for victim in victims:
            os.kill(victim, number)
        if number == signal.SIGKILL:
            for child in children:
                if child not in victims:
                    os.kill(child, signal.SIGKILL)
    ends = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    if moment is not None and 0 in ends:  # between the last look and the signal
        raise EndedFirst
    left = [path.name for path in folder.glob(".cache/resume/train/killed/*/iteration-*")]
    return {"ended": sorted(ends), "left": sorted(left)}


def killed(folder: Path, policy: Policy, size: int, name: str, moment: str, number: int = signal.SIGKILL) -> dict:
    """An attempt that is killed; on a fast machine the run may end first: then one from the start is killed, a little earlier."""
    when = moment if moment == "write" else float(moment)
    for _ in range(12):
        try:
            return attempt(folder, policy, size, name, when, number)
        except EndedFirst:
            for path in folder.glob(".cache/resume/train/killed/*"):
                checkpoint.discard(path)
            when = when if when == "write" else 0.7 * when
    raise EndedFirst(f"{name}: a signal never ended the run")


def main() -> None:
    folder, size, *moments = sys.argv[1:]
    folder, size = Path(folder), int(size)
    torch.set_num_threads(1)
    kind = moments.pop(0) if moments and moments[0] in KINDS else "world"
    adapter = Adapter(rank=2, alpha=4.0) if kind == "adapter" else None
    policy = Policy.load(folder / "models" / "pipeline", adapter=adapter, height=32, width=32, guidance=3.5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.transformer.named_parameters():
            if "norm" in name and "linear" in name or name.startswith("proj_out"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    if not moments:  # four prompts, so that up to four processes can share them
        print(json.dumps([attempt(folder, policy, size, f"{kind}-{size}", None, prompts=4)]))
        return
    log = [attempt(folder, policy, size, "whole", None)]
    for path in folder.glob(".cache/resume/train/killed/*"):
        checkpoint.discard(path)
    for place, moment in enumerate(moments):
        if moment == "term":
            log.append(killed(folder, policy, size, f"term{place}", "0.5", signal.SIGTERM))
        else:
            log.append(killed(folder, policy, size, f"kill{place}", moment))
    log.append(attempt(folder, policy, size, "resumed", None))
    print(json.dumps(log))


if __name__ == "__main__":
    main()
