"""Warns of drift, by what a run's records say about its health.

Warnings are a pure function of the records, so that a resumed run warns the same.

| what | when |
|---|---|
| `held_out` | a held-out reward keeps falling while it, or the trained reward, rises in training |
| `spread` | the members of a group score nearly alike: nothing is left to learn from |
| `no_spread` | the members of every group score alike, at first or for long: nothing is learned |
| `clipped` | nearly every ratio that can leave the clip range is outside it: updates do nothing |
| `ratio` | the ratio leaves the clip range before any update: rollout and update disagree |
| `noise` | a judge answers otherwise when asked again |
| `prompt` | a judge scores held-out images as high under the prompt of another image |
| `sign` | every reward has a negative weight |
| `eps` | weights move by little of the learning rate: gradients are small beside Adam's eps |
| `rounded` | most weights stay as they are: steps are below the distance of their numbers |
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.training.learning import GAP, GAP_ERROR, NOISE, known
from g2rpo_core.training.optimizers import is_adam
from g2rpo_core.training.settings import TrainingSettings

COLLAPSED = 0.05  # share of the spread at the run's start
CLIPPED = 0.9  # share of ratios outside the clip range
NEVER_STOPS = "ratio"  # training.max_old_policy_ratio_error does that
NOISY = 0.1  # share of a group's spread
ROUNDED = 0.5  # share of weights
MOVED = (0.2, 0.02)  # share of the learning rate: in the first iteration, and in the last ones


class DriftError(UserError):
    """A run that was stopped by `training.drift.stop`."""


def find_warnings(
    records: Sequence[Mapping], training: TrainingSettings, updates: int
) -> dict[str, str]:
    """Return the warnings after the last record (row 0 first), by their names in the table above.

    updates: per iteration, see `Method.num_updates`.
    """
    return dict(_warnings(records, training, updates))


def history(
    records: Sequence[Mapping], training: TrainingSettings, updates: int
) -> list[tuple[int, str]]:
    """Return every warning of a run, with the iteration at which it began."""
    begun: list[tuple[int, str]] = []
    before: set[str] = set()
    for end in range(1, len(records) + 1):
        now = find_warnings(records[:end], training, updates)
        begun += [
            (int(records[end - 1]["iteration"]), text)
            for name, text in now.items()
            if name not in before
        ]
        before = set(now)
    return begun


def _warnings(
    records: Sequence[Mapping], training: TrainingSettings, updates: int
) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the warnings after the last record."""
    yield from _held_out(records, training)
    yield from _judges(records, training)
    yield from _steps(records, training)
    # Clipped: with U updates per iteration, the first of them always has the ratio 1
    iterations, patience = records[1:], training.drift.patience
    last = iterations[-patience:]
    most = 1 - 1 / updates  # of clip_ratio, a mean over the updates
    if (
        most
        and len(last) == patience
        and all(record.get("clip_ratio", 0) >= CLIPPED * most for record in last)
    ):
        share = f"{CLIPPED * most:.2g} or more (of at most {most:.2g}) in {patience} iterations"
        text = (
            f"clip_ratio was {share}: updates do nothing; "
            "try a lower learning_rate or a wider clip_range"
        )
        yield "clipped", text
    # The ratio at the first update, where only rounding makes it differ from 1
    if (
        iterations
        and (error := iterations[-1].get("old_policy_ratio_error", 0.0)) > training.clip_range
    ):
        text = (
            f"|ratio - 1| was {error:.2g} before the first update, over clip_range "
            f"{training.clip_range:g}: batches of different sizes round differently; the closest "
            "are sampling.batch_tokens and training.batch_tokens of one value, and only 1 for both "
            "makes them equal"
        )
        yield "ratio", text
    # Spread: none in the last iterations (in all, of a short run); then the last against the first
    flat = []
    count = min(patience, training.iterations)
    for reward in training.rewards:
        if len(last) == count and all(record.get(f"no_spread_{reward}") == 1.0 for record in last):
            flat.append(reward)
            yield f"no_spread_{reward}", _no_spread(reward, count, training)
    # With fewer, the first and the last iterations would overlap
    if len(iterations) < 2 * patience:
        return
    for reward in (each for each in training.rewards if each not in flat):
        column = f"reward_std_{reward}"
        first, now = _mean(iterations[:patience], column), _mean(last, column)
        if now < COLLAPSED * first:
            fell = (
                f"{column} fell from {first:.2g} to {now:.2g}: a group's images score alike, "
                "and nothing is left to learn from"
            )
            remedy = "try more noise (eta), other SDE steps or a higher kl_coef"
            yield f"spread_{reward}", f"{fell}; {remedy}"


def _judges(records: Sequence[Mapping], training: TrainingSettings) -> Iterator[tuple[str, str]]:
    """Yield warnings about rewards that cannot teach what is asked of them."""
    if not any(weight > 0 for weight in training.rewards.values()):
        text = "no reward has a positive weight: the run only lowers them"
        yield "sign", f"{text}; set training.rewards"
    for reward in training.rewards:
        gap, error = (records[0].get(f"{name}{reward}", math.nan) for name in (GAP, GAP_ERROR))
        if error > 0 and gap < 2 * error:
            text = (
                f"reward {reward} is no higher for held-out images under their own prompts than "
                f"under others' ({gap:+.2g} ± {2 * error:.2g})"
            )
            yield f"prompt_{reward}", f"{text}: see that it is given the right ones"
        noise = records[1].get(f"{NOISE}{reward}", 0.0) if len(records) > 1 else 0.0
        if noise > NOISY:
            text = (
                f"reward {reward}, asked again about a group, differs by {noise:.0%} of its spread"
            )
            yield f"noise_{reward}", f"{text}: part of what is learned from is chance"


def _steps(records: Sequence[Mapping], training: TrainingSettings) -> Iterator[tuple[str, str]]:
    """Yield warnings about optimizer steps that leave weights as they are."""
    moved = [record for record in records[1:] if known(record, "step_share") is not None]
    last, adam = moved[-training.drift.patience :], is_adam(training.optimizer)
    # Of Adam's kind, a step is about the rate: row 0 has what that would leave
    looked_at = records[:1] if adam and "rounded_share" in records[0] else last
    if looked_at and (share := _mean(looked_at, "rounded_share")) > ROUNDED:
        text = (
            f"{share:.0%} of weights stay as they are: steps at a learning rate of "
            f"{training.learning_rate:g} are below the distance of numbers in their dtype"
        )
        yield "rounded", f"{text}; raise training.learning_rate, or keep trained weights in float32"
    # RAdam's first steps are not divided by the gradient's size
    elif last and adam and training.optimizer != "RAdam" and _mean(last, "grad_norm"):
        share = _mean(last, "step_share")
        if share < MOVED[0 if len(moved) == 1 else 1]:
            text = (
                f"weights move by {share:.1g} of the learning rate: gradients are small beside "
                f"adam_epsilon {training.adam_epsilon:g}"
            )
            yield "eps", f"{text}; lower it (1e-15), or raise max_grad_norm and adv_clip_max"


def _no_spread(reward: str, iterations: int, training: TrainingSettings) -> str:
    """Say that a reward teaches nothing, and what to look at."""
    learns = "nothing is learned" if len(training.rewards) == 1 else "nothing is learned from it"
    found = (
        f"reward {reward} gave all images of a group the same score, "
        f"in every group of {iterations} iterations: {learns}"
    )
    return (
        f"{found}; see what it says of other images (g2rpo score), take another reward, "
        "or more noise (eta) and larger groups"
    )


def _held_out(records: Sequence[Mapping], training: TrainingSettings) -> Iterator[tuple[str, str]]:
    """Yield warnings about the last `drift.measurements` intervals between measurements."""
    columns = [key for key in records[0] if key.startswith("heldout_")]
    measured = [
        index
        for index, record in enumerate(records)
        if columns and known(record, columns[0]) is not None
    ]
    count = training.drift.measurements
    if len(measured) <= count:
        return
    # A reward that fell, although the same reward in training, or what is trained on, rose
    points = measured[-count - 1 :]
    values = lambda column: [records[index][column] for index in points]
    weights = {
        f"heldout_{name}": weight
        for name, weight in training.rewards.items()
        if f"heldout_{name}" in columns
    }
    sums = [
        sum(weight * records[index][column] for column, weight in weights.items())
        for index in points
    ]
    for column in columns:
        name = column.removeprefix("heldout_")
        if not _rises([-value for value in values(column)]):
            continue
        if name in training.rewards:
            # Means of whole intervals: one iteration's reward depends on its prompts
            means = [
                _mean(records[start + 1 : end + 1], f"reward_{name}")
                for start, end in zip(points, points[1:])
            ]
            risen = training.rewards[name] > 0 and _rises(means)
        else:
            risen = _rises(sums)
        if risen:
            other = (
                "it rose in training"
                if name in training.rewards
                else "the held-out training reward rose"
            )
            text = (
                f"{column} fell {count} times in a row while {other}: "
                "the run overfits its prompts, or hacks its reward"
            )
            yield f"held_out_{name}", text


def _rises(values: Sequence[float]) -> bool:
    return all(before < after for before, after in zip(values, values[1:]))


def _mean(records: Sequence[Mapping], column: str) -> float:
    return sum(record[column] for record in records) / len(records)
