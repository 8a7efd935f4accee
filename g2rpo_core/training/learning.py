"""Can this run learn? Measures what its judges answer and what its steps do, and says so.

| when | what is measured |
|---|---|
| before the first iteration | which weights train; how many of them rounding would keep as they |
| | are; scores of held-out images under their own and under another prompt |
| in the first iteration | each judge's noise: a group is scored again |
| at every update | how far weights move, as a share of the learning rate |
| at every measurement | the gain on the same held-out prompts and noise, with its standard error |

All numbers are columns of the run's records (docs/metrics.md); `drift.py` warns by them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from g2rpo_core.rewards.scoring import score_all
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.training.settings import TrainingSettings

NOISE = "noise_"  # begins the names of judges' noise
GAP, GAP_ERROR = "prompt_gap_", "prompt_gap_error_"  # and of scores above those of another prompt
GAIN, GAIN_ERROR = "gain", "gain_error"
ROWS, COLUMNS = 16, 64  # of a weight's matrix, at most about, that are looked at
MATRICES = 16  # at most about, whose steps are looked at
AGAIN = 0.01  # noise above which a judge is asked three times more, for a better estimate


@torch.no_grad()
def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sample [n] of a tensor's elements, float32 or its own dtype.

    Of a sharded one, this process's part of the sample, which does not depend on their number.
    """
    local, first = tensor, 0
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        first = offset[0]
    stride = max(1, len(tensor) // ROWS)
    rows = local[-first % stride :: stride]
    flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    return flat[:, :: max(1, flat.shape[1] // COLUMNS)].flatten().clone()


def rounded_away(weights: Sequence[torch.Tensor], rate: float) -> list[float]:
    """Count in a sample of weights those that adding `rate` leaves as they are, and all."""
    parts = [sampled(weight) for weight in weights]
    same = sum((part + rate == part).sum() for part in parts)
    return [float(same), float(sum(map(len, parts)))]


class Movement:
    """What an optimizer's step does to a sample of the weights that have a gradient.

    Made before the step; not all weights, of which a copy may not fit.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter]):
        moved = [weight for weight in weights if weight.grad is not None]
        self.weights = moved[:: max(1, len(moved) // MATRICES)]
        self.before = [sampled(weight) for weight in self.weights]
        self.pushed = [sampled(weight.grad) != 0 for weight in self.weights]

    def sums(self) -> list[float]:
        """Return, after the step, the sum of |change|, and the numbers unchanged and of all."""
        changes = [
            (sampled(weight).double() - before)[pushed].abs()
            for weight, before, pushed in zip(self.weights, self.before, self.pushed)
        ]
        every = torch.cat(changes)
        return [*torch.stack([every.sum(), (every == 0).sum()]).tolist(), float(len(every))]


def movement_metrics(sums: Sequence[Sequence[float]], rate: float) -> dict[str, float]:
    """Return `step_share` and `rounded_share` from the sums of all processes; none at a rate of 0.

    The first is the mean change over the learning rate, the second the share that stays the same.
    """
    change, same, count = (sum(column) for column in zip(*sums))
    if not rate or not count:
        return {}
    return {"step_share": change / count / rate, "rounded_share": same / count}


def judge_noise(
    rewards: Mapping[str, Reward], images: torch.Tensor, prompt: str, scores: torch.Tensor
) -> dict[str, float]:
    """Return each judge's noise: the deviation of its answers to the same image, by its spread.

    images: a group [G, 3, H, W]; scores: [R, G], what they were given. 0 for a function of the
    image, about 1 for random numbers. Images that miss a score in one answer are left out.
    """
    ask = lambda: score_all(rewards, images, [prompt] * len(images)).values
    answers = torch.stack([scores, ask()])
    noise = _noise(answers)
    if max(noise, default=0.0) > AGAIN:
        noise = _noise(torch.stack([*answers, ask(), ask(), ask()]))
    return dict(zip(rewards, noise))


def _noise(answers: torch.Tensor) -> list[float]:
    """Return the noise of answers [asked, R, G] for every reward."""
    shares = []
    for of_one in answers.double().unbind(1):
        answered = of_one[:, of_one.isfinite().all(0)]
        between = answered.var(0).mean().item()  # of the same image
        within = answered.var(1).mean().item()
        shares.append((between / within) ** 0.5 if within > 0 and between > 0 else 0.0)
    return shares


def learning_lines(training: TrainingSettings, records: Sequence[Mapping]) -> Iterator[str]:
    """Yield what settings and records (row 0 first) say of learning so far."""
    yield from settings_lines(training)
    yield from record_lines(records, training)


def settings_lines(training: TrainingSettings) -> Iterator[str]:
    """Yield what the settings alone say of learning."""
    rate, decay = training.learning_rate, training.weight_decay
    steps = training.lr_warmup_steps
    warmup = f" after a warm-up of {steps} iterations" if steps else ""
    yield f"{training.optimizer} at {rate:g}, {training.lr_scheduler}{warmup}"
    # AdamW multiplies by 1 - rate x decay; half of the distance of 1 to the float32 below
    if training.optimizer == "AdamW" and 0 < rate * decay < 2**-25:
        yield f"weight decay {decay:g} does nothing: 1 - {rate:g} x {decay:g} is 1 in float32"
    for name, weight in training.rewards.items():
        if weight <= 0:
            yield f"{name} is {'lowered' if weight else 'not trained on'}: its weight is {weight:g}"


def record_lines(records: Sequence[Mapping], training: TrainingSettings) -> Iterator[str]:
    """Yield what a run's records say of learning so far."""
    start, first = records[0], records[1] if len(records) > 1 else {}
    for name in training.rewards:
        if (error := known(start, f"{GAP_ERROR}{name}")) is not None:
            above = f"{start[f'{GAP}{name}']:+.3g} ± {2 * error:.2g}"
            yield (
                f"{name} is {above} above its score under another image's prompt"
                if error
                else f"{name} does not look at its prompt"
            )
    for name in training.rewards:
        if first.get(f"no_spread_{name}") == 1:
            yield f"{name}: every group of the first iteration scored alike"
        elif (noise := known(first, f"{NOISE}{name}")) is not None:
            yield f"{name}, asked again about a group, differs by {noise:.0%} of its spread"
    if (share := known(first, "step_share")) is not None:
        yield (
            f"the first iteration moved weights by {share:.2g} of the learning rate, "
            f"and left {first['rounded_share']:.0%} as they were"
        )
    if measured := [record for record in records if known(record, GAIN_ERROR) is not None]:
        yield signal_line(measured[-1])


def known(record: Mapping, column: str) -> float | None:
    """Return a number of a record; None where it has none, also as a table's NaN."""
    value = record.get(column)
    return None if value is None or math.isnan(value) else value


def signal_line(record: Mapping) -> str:
    """Say whether the gain on held-out prompts can be told from chance, and else from when on."""
    gain, error, iteration = record[GAIN], record[GAIN_ERROR], int(record["iteration"])
    width = 2 * error  # about 95 %, of a mean over paired differences
    line = f"gain on held-out prompts after {iteration} iterations: {gain:+.3g} ± {width:.2g}"
    if abs(gain) > width:
        return f"{line}, told from chance"
    if gain <= 0:
        return f"{line}, not told from chance, and no rise that more iterations would show"
    enough = iteration * width / gain
    return f"{line}, not told from chance; at this slope it would be from {enough:.0f} on"
