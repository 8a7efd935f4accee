"""Measure, without training, the signal-to-noise of prompts' policy gradients, and their cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from g2rpo_core.algorithm.batch import Draws, Objective, Update
from g2rpo_core.algorithm.credit import CreditAssignment
from g2rpo_core.algorithm.methods import build_objective
from g2rpo_core.algorithm.objective import PolicyGradient
from g2rpo_core.config.costs import Cost, cost_of_prompt
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy, policy_settings
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.rollout import Rollout
from g2rpo_core.sampling.seeding import seed_of
from g2rpo_core.training.experience import score_gains, score_rollout
from g2rpo_core.training.trainer import Trainer

SIZE = 4096  # numbers that a gradient is projected onto
CHUNK = 2**22  # elements of a gradient that are projected at once


@dataclass(frozen=True)
class Signal:
    """Statistics of several prompts' gradients, of one step and its tails or of a whole method."""

    method: str
    """An entry of the profile."""
    step: int | None
    """The only SDE step; None: all that the method trains on in an iteration."""
    granularities: tuple[int, ...]
    snr2: float
    """Squared signal-to-noise of the sum over prompts: sum_(i != j) g_i . g_j / sum_i |g_i|^2.

    0 is pure noise.
    """
    error: float
    """Its standard error over prompts, by the jackknife."""
    cosine: float | None
    """With the judging reward's gradient, both summed over prompts.

    None without a judge, or where it tells no images apart.
    """
    evaluations: float
    """Forward evaluations (NFE) per prompt: of a step with its tails alone, or a method's mean."""
    compute: float
    """Total compute of a prompt (`config/costs.py`)."""
    prompts: int

    @property
    def per_evaluation(self) -> float:
        """Return snr2 for each forward evaluation of all prompts' rollouts."""
        return self.snr2 / (self.prompts * self.evaluations)

    @property
    def per_compute(self) -> float:
        """Return snr2 for each unit of all prompts' total compute."""
        return self.snr2 / (self.prompts * self.compute)


def project(gradients: Iterable[torch.Tensor], size: int, seed: int) -> torch.Tensor:
    """Project gradients to [size] float32 on the CPU, preserving dot products in expectation.

    A count sketch: every element, with a random sign that depends on its place and the seed, is
    added to one of `size` sums. Nothing of the gradients' size is kept but the signs of CHUNK
    elements.
    """
    total: torch.Tensor | None = None
    for number, gradient in enumerate(gradients):
        for start, part in enumerate(gradient.detach().flatten().split(CHUNK)):
            signs = torch.Generator(part.device).manual_seed(
                seed_of("projection", seed, number, start)
            )
            drawn = torch.randint(
                0, 2, part.shape, generator=signs, device=part.device, dtype=torch.int8
            )
            signed = torch.where(drawn.bool(), part.float(), -part.float())
            sums = pad(signed, (0, -len(signed) % size)).view(-1, size).sum(0)
            total = sums if total is None else total + sums
    assert total is not None, "there is no gradient"
    return total.cpu()


def signal_to_noise(gradients: torch.Tensor) -> tuple[float, float]:
    """Return the squared signal-to-noise of gradients [P, D], P > 2, and its jackknife error.

    Both are 0 if all gradients are zero.
    """
    products = gradients.double() @ gradients.double().T

    def of(chosen: torch.Tensor) -> float:
        among = products[chosen][:, chosen]
        noise = among.trace()
        return float((among.sum() - noise) / noise) if noise > 0 else 0.0

    every = torch.arange(len(gradients))
    # Leaving one out also takes away one of P - 1 partners of each
    scale = (len(every) - 1) / (len(every) - 2)
    left = torch.tensor([of(every[every != one]) * scale for one in every], dtype=torch.float64)
    error = ((len(every) - 1) / len(every) * ((left - left.mean()) ** 2).sum()).sqrt()
    return of(every), float(error)


def load_policy(
    pipeline: Path,
    weights: Path | None,
    run: ResolvedRun,
    seed: int,
    device: torch.device,
    start: Path | None = None,
) -> Policy:
    """Load a policy with gradients, as an entry computes.

    weights: a run's; None: those that its training begins with. Only a LoRA's have gradients
    if the run has one, or the base gets one. start: the weights of `training.start`.
    """
    settings = policy_settings(run.sampling.drawn, device, **run.sampling.size)
    if weights is None:
        return Policy.load_to_train(pipeline, run.training.lora, seed, start=start, **settings)
    policy = Policy.load(pipeline, weights, **settings)
    if run.method.objective.needs_base:
        began = (
            Policy.load_to_train(pipeline, run.training.lora, seed, start=start, **settings)
            if start
            else pipeline
        )
        policy.use_base(began)
    if policy.quantize and not policy.has_lora:
        raise UserError(
            f"{weights}: whole weights in {policy.quantize} have no gradients: "
            "choose a run with a LoRA"
        )
    for name, parameter in policy.transformer.named_parameters():
        parameter.requires_grad_(not policy.has_lora or "lora_" in name)
    return policy


class Gradients:
    """One entry's policy gradients on single prompts, by training's rollout and losses.

    The weights stay as they are. rewards: those of `run.training.rewards`, `judge`, and perhaps
    others, all loaded; size: of projected gradients (None: as they are).
    """

    def __init__(
        self,
        policy: Policy,
        run: ResolvedRun,
        store: EmbeddingStore,
        rewards: Mapping[str, Reward],
        judge: str | None,
        seed: int,
        size: int | None,
    ):
        training = run.training.model_copy(
            update={
                "max_grad_norm": 1e12,
                "max_old_policy_ratio_error": None,
                "ema": None,
                "rewards": {name: run.training.rewards.get(name, 0.0) for name in rewards},
            }
        )
        self.policy = policy
        self.run = run
        self.store = store
        self.rewards = rewards
        self.seed = seed
        self.size = size
        self.trainer = Trainer(replace(run, training=training), policy, store, rewards, seed)
        # Its step neither moves the weights nor keeps a state
        self.trainer.optimizer = torch.optim.SGD(  # type: ignore[assignment]
            self.trainer.parameters, lr=0.0
        )
        self.own = self._objective(training.rewards)
        self.judging = (
            self._objective({name: float(name == judge) for name in rewards}) if judge else None
        )

    def _objective(self, weights: Mapping[str, float]) -> Objective:
        """Build the entry's objective with these weights of rewards."""
        method, training = self.run.method, self.run.training
        credit = CreditAssignment(
            method.credit, method.groups, list(weights.values()), training.adv_clip_max
        )
        return build_objective(method, credit, self.trainer.sampler.sigmas, training.clip_range)

    def sample(
        self, index: int, iteration: int
    ) -> tuple[Conditioning, Rollout, torch.Tensor, list[torch.Tensor] | None]:
        """Sample and score one prompt's rollout; iteration and index decide the noise."""
        conditioning = self.policy.cut(self.store.conditioning([index]))
        text = self.store.prompts[index].text
        sampled = self.trainer.sampler(conditioning, iteration, index)
        score = lambda each: score_rollout(
            self.policy, self.rewards, each, [text], self.run.sampling.decode_batch, iteration
        )
        gains = score_gains(sampled, score) if sampled.around is not None else None
        return conditioning, sampled, score(sampled), gains

    def of(self, conditioning: Conditioning, updates: Iterable[Update]) -> torch.Tensor:
        """Return the loss's gradient [D], projected; summed over the optimizer steps.

        The weights do not move between steps.
        """
        total: torch.Tensor | None = None
        for update in updates:
            self.trainer.update(conditioning, update)
            found = [
                each.grad if each.grad is not None else torch.zeros_like(each)
                for each in self.trainer.parameters
            ]
            vector = (
                project(found, self.size, self.seed)
                if self.size
                else torch.cat([each.flatten() for each in found]).cpu()
            )
            total = vector if total is None else total + vector
        self.trainer.optimizer.zero_grad()
        assert total is not None, "nothing is trained on"
        return total


def probe_steps(
    gradients: Gradients, prompts: Sequence[int], sets: Sequence[tuple[int, ...]]
) -> list[Signal]:
    """Measure every SDE step with every set of granularities, from one rollout per prompt.

    The entry's tree must have a branch for each step, as G²RPO's, and all granularities of the
    sets.
    """
    run = gradients.run
    found: dict[tuple, list[torch.Tensor]] = {}
    names = run.method.tree.granularities
    for index in prompts:
        conditioning, sampled, scores, gains = gradients.sample(index, 0)
        draws = Draws(gradients.seed, 0, range(index, index + 1))
        for objective, kind in ((gradients.own, "own"), (gradients.judging, "judge")):
            if not isinstance(objective, PolicyGradient):  # no judge
                continue
            for tails in sets if kind == "own" else sets[:1]:
                chosen = scores[:, :, :, [names.index(each) for each in tails]]
                advantages = objective.advantages(sampled, chosen, gains)
                for each in objective.draw(sampled.transitions, advantages, draws):
                    key = (kind, each.sampled.sde_step.step, tails if kind == "own" else ())
                    found.setdefault(key, []).append(
                        gradients.of(conditioning, [objective.update([each])])
                    )
    signals = []
    for step in run.method.tree.candidates(run.sampling.steps):
        for tails in sets:
            alone = replace(
                run, method=run.method.changed(tree={"sde_steps": (step,), "granularities": tails})
            )
            signals.append(
                _signal(
                    alone,
                    step,
                    tails,
                    found["own", step, tails],
                    found.get(("judge", step, ())),
                    cost_of_prompt(alone),
                    gradients.policy,
                )
            )
    return signals


def probe_method(gradients: Gradients, prompts: Sequence[int]) -> Signal:
    """Measure the gradient of a whole iteration of an entry on each prompt.

    Iterations are spread over the training, so that windows move.
    """
    run, evaluations = gradients.run, 0
    own: list[torch.Tensor] = []
    judged: list[torch.Tensor] = []
    for number, index in enumerate(prompts):
        iteration = number * run.training.iterations // len(prompts)
        conditioning, sampled, scores, gains = gradients.sample(index, iteration)
        evaluations += sampled.num_forward_evals
        draws = Draws(gradients.seed, iteration, range(index, index + 1))
        for objective, found in ((gradients.own, own), (gradients.judging, judged)):
            if objective:
                advantages = objective.advantages(sampled, scores, gains)
                found.append(
                    gradients.of(
                        conditioning,
                        gradients.trainer.updates(conditioning, sampled, advantages, draws),
                    )
                )
    cost = cost_of_prompt(run)._replace(evaluations=evaluations / len(own))
    return _signal(
        run, None, run.method.tree.granularities, own, judged or None, cost, gradients.policy
    )


def _signal(
    run: ResolvedRun,
    step: int | None,
    tails: tuple[int, ...],
    own: list[torch.Tensor],
    judged: list[torch.Tensor] | None,
    cost: Cost,
    policy: Policy,
) -> Signal:
    """Summarize the gradients of prompts [D] each; cost: of a prompt, without guidance."""
    snr2, error = signal_to_noise(torch.stack(own))
    cosine = None
    if judged:
        ours, theirs = torch.stack(own).double().sum(0), torch.stack(judged).double().sum(0)
        cosine = (
            float(ours @ theirs / (ours.norm() * theirs.norm()))
            if ours.any() and theirs.any()
            else None
        )
    guided = policy.forward_evals
    evaluations = guided * cost.evaluations
    compute = cost._replace(evaluations=evaluations, guided=guided).total
    return Signal(run.name, step, tails, snr2, error, cosine, evaluations, compute, len(own))
