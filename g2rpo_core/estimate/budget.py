"""The cheapest way to train a method on given machines: every way to spread it that the settings know, each planned as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from g2rpo_core.config import Profile, training_of
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import Plan, changed, divisors, make_plan
from g2rpo_core.models.settings import LoraSettings

LORA = LoraSettings(rank=32, alpha=32.0)


@dataclass(frozen=True)
class Way:
    """How many GPUs, and the settings of `training` in which it differs from the profile, by their names."""

    gpus: int
    settings: dict[str, object]
    plan: Plan


def ways(profile: Profile, name: str, machines: Machines, lora: bool, rate: float | None = None) -> Iterator[Way]:
    """Every way whose memory fits: GPUs up to those of `machines`, groups that share a copy, checkpointing, replica, latents a call.

    lora: a LoRA of rank 32 in the place of all weights. Of the numbers of latents in a call only the largest that fits is given.
    """
    training = training_of(profile.training, profile.methods, name)
    first: dict = {"lora": LORA.model_dump(mode="json")} if lora else {}
    for gpus in divisors(training.prompts_per_iteration):
        if gpus > machines.gpus:
            break
        used = replace(machines, gpus=gpus, nodes=-(-gpus // machines.per_node))
        if gpus % used.nodes:
            continue
        for shard in divisors(gpus):
            for replica in (False, True) if shard > 1 else (False,):
                for checkpointing in (False, True):
                    for share in (1, 4, training.batch_tokens):
                        parallel = training.parallel.model_copy(update={"shard_size": shard, "replica": replica})
                        settings = first | {
                            "gradient_checkpointing": checkpointing,
                            "batch_tokens": training.batch_tokens // share,
                            "parallel": parallel.model_dump(),
                        }
                        plan = make_plan(changed(profile, name, settings), name, used, shard, rate)
                        if plan.fits:
                            yield Way(gpus, _differing(training, shard, replica, settings), plan)
                            break


def _differing(training, shard: int, replica: bool, settings: dict) -> dict[str, object]:
    now = {
        "parallel.shard_size": training.parallel.shard_size,
        "parallel.replica": training.parallel.replica,
        "gradient_checkpointing": training.gradient_checkpointing,
        "batch_tokens": training.batch_tokens,
        "lora": None,
    }
    new = {**now, **settings, "parallel.shard_size": shard, "parallel.replica": replica}
    return {key: value for key, value in new.items() if key in now and value != now[key]}


def cheapest(
    profile: Profile, name: str, machines: Machines, hours: float, rate: float | None = None
) -> tuple[Way | None, Way | None]:
    """Of the ways that take no more than `hours`, the one with the fewest GPU-hours; and the fastest of all, if there is any.

    All weights where the profile trains them and that is possible; else a LoRA.
    """
    fastest = None
    for lora in (False, True) if training_of(profile.training, profile.methods, name).lora is None else (False,):
        found = list(ways(profile, name, machines, lora, rate))
        fastest = min([*found, *filter(None, [fastest])], key=lambda way: way.plan.hours, default=None)
        if within := [way for way in found if way.plan.hours <= hours]:
            return min(within, key=lambda way: (way.plan.gpu_hours, len(way.settings))), fastest
    return None, fastest
