"""Look for better plans: the cheapest way to train a method on given machines, and what single changes of settings do."""

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
    """Return the way with the fewest GPU-hours of those that take at most `hours`, and the fastest of all; None where there is none.

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
    """Plan the changes that affect memory and time most; combined changes only if the present plan does not fit.

    With each change come its settings of `training`; none where it is one of machines.
    """
    training = profile.run(name).training
    lora: dict = {"lora": LORA.model_dump(mode="json")} if training.lora is None else {}
    checkpointing: dict = (
        {} if training.gradient_checkpointing else {"gradient_checkpointing": True}
    )
    smallest: dict = {"batch_tokens": 1}
    replica: dict = (
        {"parallel": training.parallel.model_dump() | {"replica": not training.parallel.replica}}
        if machines.gpus > 1
        else {}
    )
    # Single changes, then combined ones
    options: list[tuple[str, dict]] = [
        ("training.gradient_checkpointing: true", checkpointing),
        (
            "training.gradient_checkpointing: false",
            {} if checkpointing else {"gradient_checkpointing": False},
        ),
        ("training.lora: LoRA of rank 32", lora),
        (f"training.parallel.replica: {str(not training.parallel.replica).lower()}", replica),
    ]
    if not fits:
        options += [
            ("training.batch_tokens for one latent per call", smallest),
            (
                "checkpointing and one latent per call",
                checkpointing | smallest if checkpointing else {},
            ),
            (
                "LoRA and training.gradient_checkpointing: true",
                lora | checkpointing if lora and checkpointing else {},
            ),
            (
                "LoRA, checkpointing and one latent per call",
                lora | checkpointing | smallest if lora else {},
            ),
        ]
    planned = [
        (label, make_plan(changed(profile, name, change), name, machines, shard, rate), change)
        for label, change in options
        if change
    ]
    # Other numbers of GPUs per model
    now = shard or min(training.parallel.shard_size or machines.gpus, machines.gpus)
    for size in divisors(machines.gpus):
        if size != now:
            parallel = {"parallel": training.parallel.model_dump() | {"shard_size": size}}
            planned.append(
                (
                    f"training.parallel.shard_size: {size}",
                    make_plan(profile, name, machines, size, rate),
                    parallel,
                )
            )
    # More GPUs, if nothing else fits
    best = checkpointing | smallest
    for more in () if fits else (2, 4, 8, 16, 32):
        if more > machines.gpus and training.prompts_per_iteration % more == 0:
            plan = make_plan(
                changed(profile, name, best),
                name,
                replace(machines, gpus=more, nodes=count_nodes(more)),
                more,
                rate,
            )
            if plan.fits:
                planned.append(
                    (f"{more} GPUs per model, checkpointing, one latent per call", plan, {})
                )
                break
    return planned


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, rising."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def changed(profile: Profile, name: str, training: dict) -> Profile:
    """Return the profile with other settings of `training` for a method."""
    run = profile.methods[name]
    run = run.model_copy(update={"training": run.training | training})
    return profile.changed(methods={**profile.methods, name: run})
