"""Trains a policy by online RL: any method, one loop.

The data's way through an iteration:

    prompts -> rollout -> images -> rewards [R, P, B, J, G]      experience.py
            -> advantages [P, B, G]                              algorithm/credit.py
            -> batches: states with M next states each,
               or noised images -> loss                          algorithm/{objective,matching}.py
            -> one or more optimizer steps -> a record           metrics.py

R rewards, P prompts of this process, B branches of the rollout's tree, J granularities, G members
of a group.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from g2rpo_core.algorithm.batch import Draws, Update
from g2rpo_core.algorithm.credit import CreditAssignment
from g2rpo_core.algorithm.methods import build_objective
from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore
from g2rpo_core.data.prompts import prompt_order
from g2rpo_core.distributed.launcher import Terminated, Termination
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.loading import (
    check_gradients,
    describe_trained,
    reduce_gradients,
    reshard,
)
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.rollout import Rollout, velocity_in_batches
from g2rpo_core.training.average import Average
from g2rpo_core.training.drift import DriftError, find_warnings
from g2rpo_core.training.experience import (
    NonFiniteError,
    RolloutSampler,
    score_gains,
    score_rollout,
)
from g2rpo_core.training.learning import (
    NOISE,
    Movement,
    judge_noise,
    learning_lines,
    movement_metrics,
    rounded_away,
)
from g2rpo_core.training.metrics import START, reward_metrics, update_metrics
from g2rpo_core.training.optimizers import make_optimizer
from g2rpo_core.training.settings import RunSettings


class Trainer:
    """The training of `policy.transformer`, in place.

    rewards: those that `training.rewards` weighs, in its order; prompts: the encoded training
    prompts; seed: decides the order of the prompts, all noise and the drawn steps; processes: each
    takes its share of every iteration's prompts, whole groups; what it samples depends on the
    prompt's index among all, so that any number of processes computes the same.
    """

    def __init__(
        self,
        run: RunSettings,
        policy: Policy,
        prompts: EmbeddingStore,
        rewards: Mapping[str, Reward],
        seed: int,
        processes: ProcessGroup = ALONE,
        termination: Termination | None = None,
    ):
        self.policy, self.method = policy, run.method
        self.sampling, self.training = run.sampling, run.training
        self.prompts, self.rewards, self.seed = prompts, rewards, seed
        self.processes = processes
        # A Termination that nobody asks: a caller without signals needs no special case
        self.termination = termination or Termination()
        method, training = run.method, run.training
        self.sampler = RolloutSampler(policy, method, run.sampling, training.num_generations, seed)
        # Called with an iteration, a prompt, and images and scores of the iteration's first group
        self.watch: Callable[[int, str, torch.Tensor, torch.Tensor], None] | None = None
        self.noise: dict[str, float] = {}  # of each judge
        self.num_images = 0  # that the last iteration sampled, of all processes
        # Whether the weights are those with which the iteration began
        self.weights_unchanged = True
        weights = [training.reward_weights[name] for name in rewards]
        credit = CreditAssignment(
            method.credit, method.groups, weights, training.adv_clip_max, processes
        )
        self.objective = build_objective(method, credit, self.sampler.sigmas, training.clip_range)
        # What has no part in the output gets no gradient: an optimizer would have no state of it
        idle = policy.architecture.idle(policy.transformer.config)
        self.trained = {
            name: parameter
            for name, parameter in policy.trained_parameters().items()
            if not name.startswith(idle)
        }
        self.parameters = list(self.trained.values())
        self.rate = training.rate_schedule()
        try:
            self.optimizer = make_optimizer(
                training.optimizer, self.parameters, **training.optimizer_settings
            )
        except ValueError as error:  # of these weights, such as Muon's of matrices alone
            raise UserError(f"training.optimizer: {error}") from None
        self.has_gradients = False  # seen after the first backward pass
        # Before the first rollout: a backend without gradients would be found after minutes
        policy.check_attention(trained=True)
        policy.transformer.train()
        if training.gradient_checkpointing:
            policy.transformer.enable_gradient_checkpointing()
        # Before a checkpoint is restored: now the weights are those before training
        if method.objective.needs_base:
            policy.keep_base()
        self.ema = Average(policy, training.ema) if training.ema else None
        self.old = Average(policy, method.objective.old) if method.objective.old else None

    def run(self, last: Mapping = MappingProxyType(START)) -> Iterator[dict]:
        """Yield the record of each iteration after `last`; docs/metrics.md lists its columns.

        The iteration's number decides its prompts, noise, window and learning rate; beyond that, a
        resumed run only needs the weights and the optimizer (`state`). Raises Terminated after
        SIGTERM, before the iteration has changed the weights.
        """
        totals = {name: last[name] for name in ("num_forward_evals", "num_transitions", "seconds")}
        for iteration in range(last["iteration"], self.training.iterations):
            start = time.perf_counter()
            record = self.iterate(iteration)
            # What the caller does between iterations does not count
            record["seconds"] = time.perf_counter() - start
            totals = {name: total + record.pop(name) for name, total in totals.items()}
            yield {"iteration": iteration + 1, **totals, **record}

    def iterate(self, iteration: int) -> dict:
        """Run one iteration, from 0, and return its record, with counts over all processes."""
        training, processes = self.training, self.processes
        self.weights_unchanged = True
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(iteration)

        # Its prompts, by number, not by a data loader: a resumed run has the same
        count = training.prompts_per_iteration
        mine = processes.share(count)
        order = prompt_order(iteration, count, len(self.prompts), self.seed)
        indices = [order[index] for index in mine]
        texts = [self.prompts.prompts[index].text for index in indices]
        # In one length for all that the iteration computes, or its ratios would not begin at 1
        conditioning = self.policy.cut(self.prompts.conditioning(indices), processes)

        # Rollout and rewards
        old = self.method.objective.old
        with self._by_old(old is not None and old.samples):
            sampled = self.sampler(conditioning, iteration, mine.start, self._stop_if_asked)
        score = partial(
            score_rollout,
            self.policy,
            self.rewards,
            texts=texts,
            decode_batch=self.sampling.decode_batch,
            iteration=iteration,
            processes=processes,
            before_call=self._stop_if_asked,
        )
        rewards = score(sampled, watch=partial(self._look, iteration, texts[0]))
        noise = self._check_noise() if iteration == 0 else {}
        self.num_images = rewards[0].numel() * processes.size
        # Advantages, and what is trained on
        gains = score_gains(sampled, score) if sampled.around is not None else None
        advantages = self.objective.advantages(sampled, rewards, gains)
        coming = self.updates(conditioning, sampled, advantages, Draws(self.seed, iteration, mine))
        self._stop_if_asked()
        # Updates
        try:
            updates = [self.update(conditioning, each) for each in coming]
        except NonFiniteError as error:
            prompts = ", ".join(map(repr, texts))
            where = f"iteration {iteration + 1}"
            raise NonFiniteError(f"{where}: {error}; the prompts are {prompts}") from None
        self.optimizer.zero_grad()  # frees their memory for the next rollout
        if self.old:
            self.old.update()
        self.policy.refresh()

        counts = {
            "num_forward_evals": sampled.num_forward_evals * self.policy.forward_evals,
            "num_transitions": sum(update["num_transitions"] for update in updates),
        }
        return {
            **{name: number * processes.size for name, number in counts.items()},
            **self._means(sampled, rewards, advantages),
            **noise,
            **update_metrics(updates),
        }

    def start(self) -> dict[str, float]:
        """Return what is known of learning before the first iteration, for row 0. Collective."""
        counts = self.processes.gather(rounded_away(self.parameters, self.training.learning_rate))
        same, count = (sum(column) for column in zip(*counts))
        return {"rounded_share": same / count}

    def can_learn(self, records: Sequence[Mapping] = ()) -> list[str]:
        """Say in lines what trains, and whether it can learn by all that these records show.

        records: of the run so far, row 0 first. Collective where there are none.
        """
        known = [*records] or [{**START, **self.start()}]
        updates = self.method.num_updates(self.sampling.steps)
        warnings = find_warnings(known, self.training, updates).values()
        return [
            describe_trained(self.sizes),
            *learning_lines(self.training, known),
            *(f"warning: {text}" for text in warnings),
        ]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of elements of every trained parameter, by name."""
        return {name: parameter.numel() for name, parameter in self.trained.items()}

    def _look(
        self, iteration: int, prompt: str, images: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Measure the judges' noise on the run's first group, and show an iteration's first one."""
        if iteration == 0:
            self.noise = judge_noise(self.rewards, images, prompt, scores)
        if self.watch:
            self.watch(iteration + 1, prompt, images, scores)

    def _check_noise(self) -> dict[str, float]:
        """Return `noise_<reward>`, means over processes; DriftError above the limit. Collective."""
        means = dict(zip(self.noise, self.processes.mean(list(self.noise.values()))))
        limit = self.training.drift.max_reward_noise
        for name, value in means.items():
            if limit is not None and value > limit and self.training.rewards[name]:
                raise DriftError(
                    f"reward {name}: asked again about the same group, its answers differ by "
                    f"{value:.0%} of the group's spread: it is no function of the image, and "
                    "nothing can be learned from it; make it answer alike (a temperature of 0, a "
                    "fixed seed), or set training.drift.max_reward_noise"
                )
        return {f"{NOISE}{name}": value for name, value in means.items()}

    def _means(
        self, sampled: Rollout, rewards: torch.Tensor, advantages: list[torch.Tensor]
    ) -> dict[str, float]:
        """Return the means of rewards and advantages over all processes. Collective."""
        means = reward_metrics(
            list(self.rewards),
            rewards,
            torch.cat([each.flatten() for each in advantages]),
            sampled.granularities,
            self.training.adv_clip_max,
            self.method.groups,
        )
        return dict(zip(means, self.processes.mean(list(means.values()))))

    def updates(
        self,
        conditioning: Conditioning,
        sampled: Rollout,
        advantages: list[torch.Tensor],
        draws: Draws,
    ) -> Iterable[Update]:
        """Return the optimizer steps of an iteration; old velocities are the old policy's."""
        field = self.policy.velocity(conditioning)
        # Old velocities are computed in the batches of training, or they would round differently
        size = self.policy.batch_size(self.training.batch_tokens, conditioning)

        def one_call(*arguments: torch.Tensor) -> torch.Tensor:
            self._stop_if_asked()
            return field(*arguments)

        with self._by_old(True):
            return self.objective.updates(
                sampled, advantages, draws, partial(velocity_in_batches, one_call, max_batch=size)
            )

    def _by_old(self, wanted: bool) -> AbstractContextManager:
        """Within the block, the policy has the old policy's weights if wanted. Collective."""
        return self.old.in_place() if wanted and self.old else nullcontext()

    def update(self, conditioning: Conditioning, update: Update) -> dict:
        """Make one optimizer step on the mean weighted loss (Eq. 12), in as many batches as needed.

        Return the step's metrics; NonFiniteError before the step if a number is not finite, or the
        old policy's ratio is not 1.
        """
        objective = self.objective
        # Batches that fit into memory
        size = self.policy.batch_size(self.training.batch_tokens, conditioning)
        parts = [part for whole in update.batches for part in whole.split(size)]
        velocity = self.policy.velocity(conditioning)
        reference = (
            self.policy.base_velocity(conditioning) if self.method.objective.needs_base else None
        )
        # Gradients of the weighted loss, batch after batch
        sums: list[torch.Tensor] = []
        worst: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        for batch in parts:
            self._stop_if_asked()
            reduce_gradients(
                self.policy.transformer,
                self.training.parallel.reduce == "call" or batch is parts[-1],
            )
            # Divided once by all samples: batches of different sizes weigh by what is in them
            losses = objective.losses(velocity, reference, batch)
            (losses.total.sum() / update.num_samples).backward()
            sums.append(torch.stack(list(losses.sums.values())))
            worst += [] if losses.ratio_error is None else [losses.ratio_error]
        if parts and not self.has_gradients:
            check_gradients(
                self.policy.architecture, self.policy.transformer, self.policy.attention
            )
            self.has_gradients = True
        # Figures over all processes, and the optimizer's step
        figures = dict(
            zip(
                losses.sums,
                self.processes.mean(torch.stack(sums).sum(0).div(update.num_samples).tolist()),
            )
        )
        if worst:
            figures["old_policy_ratio_error"] = max(
                self.processes.gather(torch.stack(worst).max().item())
            )
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        # Before the step: weights that are not numbers cannot be taken back
        self._check_update(figures, norm, update.description)
        self.weights_unchanged = False
        movement = self._step()
        if self.ema:
            self.ema.update()
        return {
            **figures,
            "grad_norm": norm,
            **movement,
            "num_transitions": sum(map(len, update.batches)),
        }

    def _step(self) -> dict[str, float]:
        """Step the optimizer; return how far weights moved. Collective."""
        movement = Movement(self.parameters)
        self.optimizer.step()
        sums = self.processes.gather(movement.sums())
        return movement_metrics(sums, self.optimizer.param_groups[0]["lr"])

    def _check_update(self, figures: dict[str, float], norm: float, where: str) -> None:
        loss, ratio_error = figures["loss"], figures.get("old_policy_ratio_error", 0.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(
                f"loss {loss} with gradient norm {norm} at {where}; nothing was updated"
            )
        limit = self.training.max_old_policy_ratio_error
        # Only before the first update of an iteration: after it the ratio is meant to differ from 1
        if limit and self.weights_unchanged and ratio_error > limit * self.training.clip_range:
            raise NonFiniteError(
                f"|ratio - 1| is {ratio_error:.2g} before the first update, "
                f"over {limit * self.training.clip_range:.2g} "
                "(training.max_old_policy_ratio_error clip ranges): "
                "rollout and training do not compute the same"
            )

    def state(self) -> dict[str, dict]:
        """Return what training changes, by name: weights, AdamW's moments, EMA, old policy."""
        # After a forward without gradients the root is gathered, in the computation's dtype
        reshard(self.policy.transformer)
        averages = {
            name: average.state()
            for name, average in (("ema", self.ema), ("old", self.old))
            if average
        }
        weights = self.policy.trained_parameters()
        # Adagrad has a state before its first step, and SGD without momentum never one
        moments = {name: self.optimizer.state.get(each, {}) for name, each in self.trained.items()}
        return {
            "weights": {name: parameter.detach() for name, parameter in weights.items()},
            "moments": {name: of_one for name, of_one in moments.items() if of_one},
            **averages,
        }

    def result(self) -> AbstractContextManager:
        """Within the block, the policy has the weights to keep: the EMA's, if any. Collective."""
        return self.ema.in_place() if self.ema else nullcontext()

    def restore(self, load: Callable[[dict], None], updated: bool) -> None:
        """Restore a state.

        load: reads it into the tensors that it is given; updated: whether the optimizer had made a
        step.
        """
        if updated:
            # A step at rate 0 on gradients of 0 makes the optimizer lay out its state
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
        load(self.state())
        self.policy.refresh()

    def _stop_if_asked(self) -> None:
        """Raise Terminated if SIGTERM came.

        Called while the iteration has not changed the weights, so that a checkpoint can be written.
        """
        if self.processes.first("asked" if self.termination.requested else None):
            raise Terminated
