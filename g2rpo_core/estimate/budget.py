"""The cheapest way to train a method on given machines: plans every way to spread it that the settings allow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

from g2rpo_core.config import Profile, training_of
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import LORA, Plan, changed, divisors, make_plan
from g2rpo_core.training.settings import TrainingSettings


@dataclass(frozen=True)
class Way:
    """A number of GPUs, and the settings of `training` that differ from the profile, by name."""

    gpus: int
    settings: dict[str, object]
    plan: Plan


def ways(profile: Profile, name: str, machines: Machines, lora: bool, rate: float | None = None) -> Iterator[Way]:
    """Every way that fits into memory.

    Ways differ in the number of GPUs (up to those of `machines`), groups that share a copy, checkpointing, replica, latents per
    call. lora: train a LoRA of rank 32 instead of all weights. Of the numbers of latents per call, only the largest that fits is
    given.
    """
    training = training_of(profile.training, profile.methods, name)
    for gpus in divisors(training.prompts_per_iteration):
        if gpus > machines.gpus:
            break
        used = replace(machines, gpus=gpus, nodes=-(-gpus // machines.per_node))
        if gpus % used.nodes:
            continue
        for shard, replica, checkpointing in product(divisors(gpus), (False, True), (False, True)):
            if replica and shard == 1:
                continue
            parallel = {"shard_size": shard, "replica": replica}
            chosen: dict = {"gradient_checkpointing": checkpointing} | ({"lora": LORA.model_dump(mode="json")} if lora else {})
            for share in (1, 4, training.batch_tokens):
                chosen["batch_tokens"] = training.batch_tokens // share
                settings = chosen | {"parallel": training.parallel.model_dump() | parallel}
                plan = make_plan(changed(profile, name, settings), name, used, rate=rate)
                if plan.fits:
                    named = chosen | {f"parallel.{key}": value for key, value in parallel.items()}
                    yield Way(gpus, {key: value for key, value in named.items() if value != _now(training, key)}, plan)
                    break


def _now(training: TrainingSettings, key: str) -> object:
    """A setting of the profile by its name, such as `parallel.replica`."""
    return reduce(getattr, key.split("."), training)


def cheapest(
    profile: Profile, name: str, machines: Machines, hours: float, rate: float | None = None
) -> tuple[Way | None, Way | None]:
    """The way with the fewest GPU-hours of those that take at most `hours`, and the fastest of all; None where there is none.

    Trains all weights if the profile does and that is possible, else a LoRA.
    """
    fastest = None
    for lora in (False, True) if training_of(profile.training, profile.methods, name).lora is None else (False,):
        found = list(ways(profile, name, machines, lora, rate))
        fastest = min([*found, *filter(None, [fastest])], key=lambda way: way.plan.hours, default=None)
        if within := [way for way in found if way.plan.hours <= hours]:
            return min(within, key=lambda way: (way.plan.gpu_hours, len(way.settings))), fastest
    return None, fastest
