"""Better plans: the cheapest way to train on given machines, and the effect of single changes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

from g2rpo_core.config import Profile
from g2rpo_core.estimate.machines import ASSUMED, Machines, Rate, count_nodes
from g2rpo_core.estimate.plan import Plan, make_plan
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.training.settings import TrainingSettings

LORA = LoraSettings(rank=32, alpha=32.0)  # tried if all weights do not fit
CHECKPOINTING = {"gradient_checkpointing": True}
ONE_LATENT = {"batch_tokens": 1}  # per call
MARGIN = 0.97  # of a GPU's memory, that what is advised may take: an estimate is no measurement


@dataclass(frozen=True)
class Way:
    """A number of GPUs, and the settings of `training` that differ from the profile, by name."""

    gpus: int
    settings: dict[str, object]
    plan: Plan
    whole: dict[str, object]
    """The same settings as a profile has them, those of `parallel` together."""


def ways(
    profile: Profile, name: str, machines: Machines, lora: bool, rate: Rate = ASSUMED
) -> Iterator[Way]:
    """Yield every way that fits into memory.

    Ways differ in the number of GPUs (up to those of `machines`), groups that share a copy,
    checkpointing, replica, latents per call. lora: train a LoRA of rank 32 instead of all weights.
    Of the numbers of latents per call, only the largest that fits is given.
    """
    training = profile.run(name).training
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
            chosen: dict = {"gradient_checkpointing": checkpointing} | (
                {"lora": LORA.model_dump(mode="json")} if lora else {}
            )
            for tokens in dict.fromkeys(
                (training.batch_tokens, max(1, training.batch_tokens // 4), 1)
            ):
                chosen["batch_tokens"] = tokens
                settings = chosen | {"parallel": training.parallel.model_dump() | parallel}
                plan = make_plan(changed(profile, name, settings), name, used, rate=rate)
                if has_room(plan, used):
                    named = chosen | {f"parallel.{key}": value for key, value in parallel.items()}
                    present = training.model_dump(mode="json")
                    differing = {
                        key: value for key, value in settings.items() if value != present[key]
                    }
                    yield Way(
                        gpus,
                        {
                            key: value
                            for key, value in named.items()
                            if value != _now(training, key)
                        },
                        plan,
                        differing,
                    )
                    break


def _now(training: TrainingSettings, key: str) -> object:
    """Return a setting of the profile by its name, such as `parallel.replica`."""
    return reduce(getattr, key.split("."), training)


def cheapest(
    profile: Profile, name: str, machines: Machines, hours: float, rate: Rate = ASSUMED
) -> tuple[Way | None, Way | None]:
    """Return the way with the fewest GPU-hours within `hours`, and the fastest; None for neither.

    Train all weights if the profile does and that is possible, else a LoRA.
    """
    fastest = None
    for lora in (False, True) if profile.run(name).training.lora is None else (False,):
        fitting = list(ways(profile, name, machines, lora, rate))
        fastest = min(
            [*fitting, *filter(None, [fastest])], key=lambda way: way.plan.hours, default=None
        )
        if within := [way for way in fitting if way.plan.hours <= hours]:
            return min(within, key=lambda way: (way.plan.gpu_hours, len(way.settings))), fastest
    return None, fastest


def has_room(plan: Plan, machines: Machines) -> bool:
    """Tell whether a plan fits with the margin that advice leaves."""
    return plan.memory_total_gib <= MARGIN * machines.memory


def changes(
    profile: Profile,
    name: str,
    machines: Machines,
    fits: bool,
    shard: int | None = None,
    rate: Rate = ASSUMED,
) -> list[tuple[str, Plan, dict]]:
    """Plan the changes that affect memory and time most, each with its settings of `training`.

    These are empty for a change of machines. Changes are combined only if the present plan does not
    fit.
    """
    training = profile.run(name).training
    planned = [
        (label, make_plan(changed(profile, name, change), name, machines, shard, rate), change)
        for label, change in _options(training, machines.gpus, fits).items()
        if change
    ]
    # Other numbers of GPUs per model
    now = shard or min(training.parallel.shard_size or machines.gpus, machines.gpus)
    for size in divisors(machines.gpus):
        if size != now:
            label = f"training.parallel.shard_size: {size}"
            parallel = {"parallel": training.parallel.model_dump() | {"shard_size": size}}
            planned.append((label, make_plan(profile, name, machines, size, rate), parallel))
    # More GPUs, if nothing else fits
    smallest = changed(profile, name, CHECKPOINTING | ONE_LATENT)
    for more in () if fits else (2, 4, 8, 16, 32):
        if more > machines.gpus and training.prompts_per_iteration % more == 0:
            larger = replace(machines, gpus=more, nodes=count_nodes(more))
            plan = make_plan(smallest, name, larger, more, rate)
            if plan.fits:
                label = f"{more} GPUs per model, checkpointing, one latent per call"
                planned.append((label, plan, {}))
                break
    return planned


def _options(training: TrainingSettings, gpus: int, fits: bool) -> dict[str, dict]:
    """Return changes of `training` by their labels; {} for one that changes nothing here."""
    lora: dict = {"lora": LORA.model_dump(mode="json")} if training.lora is None else {}
    checkpointing = {} if training.gradient_checkpointing else CHECKPOINTING
    other = not training.parallel.replica
    replica = {"parallel": training.parallel.model_dump() | {"replica": other}}
    single = {
        "training.gradient_checkpointing: true": checkpointing,
        "training.gradient_checkpointing: false": (
            {} if checkpointing else {"gradient_checkpointing": False}
        ),
        "training.lora: LoRA of rank 32": lora,
        f"training.parallel.replica: {str(other).lower()}": replica if gpus > 1 else {},
    }
    if fits:
        return single
    return single | {
        "training.batch_tokens for one latent per call": ONE_LATENT,
        "checkpointing and one latent per call": (
            checkpointing | ONE_LATENT if checkpointing else {}
        ),
        "LoRA and training.gradient_checkpointing: true": (
            lora | checkpointing if lora and checkpointing else {}
        ),
        "LoRA, checkpointing and one latent per call": (
            lora | checkpointing | ONE_LATENT if lora else {}
        ),
    }


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, rising."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def changed(profile: Profile, name: str, training: dict) -> Profile:
    """Return the profile with other settings of `training` for a method."""
    run = profile.methods[name]
    run = run.model_copy(update={"training": run.training | training})
    return profile.changed(methods={**profile.methods, name: run})
