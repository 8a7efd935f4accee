"""Trains a policy by online RL: any method, one loop.

The data's way through an iteration:

    prompts -> rollout -> images -> rewards [R, P, B, J, G] -> advantages [P, B, G]     (experience.py, algorithm/credit.py)
            -> transition batches: N states, M next states each -> loss                  (algorithm/objective.py)
            -> one or more optimizer steps -> a record                                   (metrics.py)

R rewards, P prompts of this process, B branches of the rollout's tree, J granularities, G members of a group.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from g2rpo_core.algorithm.batch import TrainedTransition
from g2rpo_core.algorithm.credit import transition_advantages
from g2rpo_core.algorithm.methods import Method
from g2rpo_core.algorithm.objective import PolicyGradient
from g2rpo_core.common.seeding import seed_of
from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore
from g2rpo_core.data.prompts import prompt_order
from g2rpo_core.distributed.launcher import Terminated, Termination
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.models.loading import apply_gradient_checkpointing, reduce_gradients, reshard
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.experience import NonFiniteError, RolloutSampler, score_gains, score_rollout
from g2rpo_core.training.metrics import START, reward_metrics, update_metrics
from g2rpo_core.training.settings import EmaSettings, TrainingSettings


def learning_rate_at(iteration: int, training: TrainingSettings) -> float:
    """Return the learning rate of an iteration, from 0: constant, or falling linearly to 0 after the last."""
    if training.lr_scheduler == "constant":
        return training.learning_rate
    return training.learning_rate * (1 - iteration / training.iterations)


class Trainer:
    """The training of `policy.transformer`, in place.

    rewards: those that `training.rewards` weighs, in its order; prompts: the encoded training prompts; seed: decides the order of
    the prompts, all noise and the drawn steps; processes: each takes its share of every iteration's prompts, whole groups; what
    it samples depends on the prompt's index among all, so that any number of processes computes the same.
    """

    def __init__(
        self,
        policy: Policy,
        method: Method,
        sampling: SamplingSettings,
        training: TrainingSettings,
        prompts: EmbeddingStore,
        rewards: Mapping[str, Reward],
        seed: int,
        processes: ProcessGroup = ProcessGroup(),  # noqa: B008
        termination: Termination | None = None,
    ):
        self.policy, self.method, self.sampling, self.training = policy, method, sampling, training
        self.prompts, self.rewards, self.seed = prompts, rewards, seed
        self.machine, self.processes, self.termination = policy.machine, processes, termination or Termination()
        self.sampler = RolloutSampler(policy, method, sampling, training.num_generations, seed)
        # Called with an iteration, a prompt, and the images and scores of the iteration's first group
        self.watch: Callable[[int, str, torch.Tensor, torch.Tensor], None] | None = None
        self.num_images = 0  # that the last iteration sampled, of all processes
        # Whether the weights are those with which the iteration began
        self.weights_unchanged = True
        spans = method.tree.spans_at(sampling.steps)
        self.objective = PolicyGradient(
            method.objective, self.sampler.transition, self.sampler.sigmas, training.clip_range, spans
        )
        self.parameters = list(policy.trained_parameters().values())
        self.optimizer = torch.optim.AdamW(self.parameters, training.learning_rate, weight_decay=training.weight_decay)
        policy.transformer.train()
        if training.gradient_checkpointing:
            apply_gradient_checkpointing(policy.transformer)
        if method.objective.kl_coef:
            policy.keep_base()
        self.ema = Ema(policy, training.ema) if training.ema else None

    def run(self, last: Mapping = MappingProxyType(START)) -> Iterator[dict]:
        """Yield the record of each iteration after that of `last`, after its updates; docs/metrics.md lists its columns.

        The iteration's number decides its prompts, noise, window and learning rate; beyond that, a resumed run only needs the
        weights and the optimizer (`state`). Raises Terminated after SIGTERM, before the iteration has changed the weights.
        """
        num_forward_evals, num_transitions, seconds = last["num_forward_evals"], last["num_transitions"], last["seconds"]
        for iteration in range(last["iteration"], self.training.iterations):
            start = time.perf_counter()
            record = self.iterate(iteration)
            num_forward_evals += record.pop("num_forward_evals")
            num_transitions += record.pop("num_transitions")
            # What the caller does between iterations does not count
            seconds += time.perf_counter() - start
            totals = {"num_forward_evals": num_forward_evals, "num_transitions": num_transitions, "seconds": seconds}
            yield {"iteration": iteration + 1, **totals, **record}

    def iterate(self, iteration: int) -> dict:
        """Run one iteration, from 0, and return its record, with the iteration's forward evaluations and transitions over all processes."""
        training, processes = self.training, self.processes
        self.weights_unchanged = True
        self.optimizer.param_groups[0]["lr"] = learning_rate_at(iteration, training)

        # Its prompts
        mine = processes.share(training.prompts_per_iteration)
        order = prompt_order(iteration, training.prompts_per_iteration, len(self.prompts), self.seed)
        indices = [order[index] for index in mine]
        texts = [self.prompts.prompts[index].text for index in indices]
        conditioning = self.prompts.conditioning(indices)

        # Rollout and rewards
        with self.machine.phase("rollout"):
            sampled = self.sampler(conditioning, iteration, mine.start, before_call=self._stop_if_asked)
        score = partial(
            score_rollout, self.policy, self.rewards, texts=texts, decode_batch=self.sampling.decode_batch, iteration=iteration,
            processes=processes, before_call=self._stop_if_asked,
        )  # fmt: skip
        rewards = score(sampled, watch=partial(self.watch, iteration + 1, texts[0]) if self.watch else None)
        self.num_images = rewards[0].numel() * processes.size
        # Advantages, and the transitions that are trained
        gains = score_gains(sampled, score) if sampled.around is not None else None
        weights = [training.rewards[name] for name in self.rewards]
        advantages = transition_advantages(
            sampled.transitions, rewards, gains, self.method.credit, self.method.groups, weights, training.adv_clip_max, processes
        )
        rng_of = lambda *index: random.Random(seed_of("trained", self.seed, iteration, *index))
        transitions = self.objective.trained(sampled.transitions, advantages, rng_of, mine)
        self._stop_if_asked()
        # Updates
        try:
            with self.machine.phase("update"):
                updates = [self.update(conditioning, part) for part in self.objective.updates(transitions)]
        except NonFiniteError as error:
            prompts = ", ".join(map(repr, texts))
            raise NonFiniteError(f"iteration {iteration + 1}: {error}; the prompts are {prompts}") from None
        self.optimizer.zero_grad()  # frees their memory for the next rollout
        self.policy.refresh()

        # The record
        every = torch.cat([each.flatten() for each in advantages])
        means = reward_metrics(list(self.rewards), rewards, every, sampled.granularities, training.adv_clip_max)
        return {
            "num_forward_evals": sampled.num_forward_evals * self.policy.forward_evals * processes.size,
            "num_transitions": sum(update["num_transitions"] for update in updates) * processes.size,
            **dict(zip(means, processes.mean(list(means.values())))),
            **update_metrics(updates),
        }

    def update(self, conditioning: Conditioning, transitions: list[TrainedTransition]) -> dict:
        """Make one optimizer step on the mean weighted loss over all given transitions, in as many batches as it takes (Eq. 12).

        Return the step's metrics; NonFiniteError before the step if a number is not finite, or the old policy's ratio is not 1.
        """
        objective = self.objective
        # Batches of states, and what the loss is a mean over
        batches = objective.batches(transitions, self.processes)
        total = sum(map(objective.num_samples, batches))
        size = self.policy.batch_size(self.training.batch_tokens, conditioning)
        parts = [part for whole in batches for part in whole.split(size)]
        velocity = self.policy.velocity(conditioning)
        reference = self.policy.base_velocity(conditioning) if self.method.objective.kl_coef else None
        # Gradients of the weighted loss, batch after batch
        sums = []
        self.optimizer.zero_grad()
        for batch in self.machine.passes(parts):
            self._stop_if_asked()
            reduce_gradients(self.policy.transformer, self.training.parallel.reduce == "call" or batch is parts[-1])
            losses = objective.losses(velocity, reference, batch)
            (losses.total.sum() / total).backward()
            sums.append(torch.stack([*losses.sums.values(), losses.ratio_error]))
        # Figures over all processes, and the optimizer's step
        means = self.processes.mean(torch.stack(sums).sum(0).div(total).tolist())
        figures = dict(zip(losses.sums, means))
        ratio_error = max(self.processes.gather(torch.stack(sums)[:, -1].max().item()))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        self._check_update(figures["loss"], norm, ratio_error, [transition.sampled.sde_step.step for transition in transitions])
        self.weights_unchanged = False
        with self.machine.phase("optimizer"):
            self.optimizer.step()
        if self.ema:
            self.ema.update(int(next(iter(self.optimizer.state.values()))["step"]) - 1)
        return {
            **figures,
            "grad_norm": norm,
            "old_policy_ratio_error": ratio_error,
            "num_transitions": sum(len(batch.latents) for batch in batches),
        }

    def _check_update(self, loss: float, norm: float, ratio_error: float, steps: list[int]) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(f"loss {loss} with gradient norm {norm} at the SDE steps {steps}; nothing was updated")
        allowed = self.training.max_old_policy_ratio_error * self.training.clip_range
        if self.weights_unchanged and ratio_error > allowed:
            raise NonFiniteError(
                f"|ratio - 1| is {ratio_error:.2g} before the first update, over {allowed:.2g} (training.max_old_policy_ratio_error clip "
                "ranges): rollout and training do not compute the same"
            )

    def state(self) -> dict[str, dict]:
        """Return what the iterations change, by name: the trained weights, the optimizer's moments once it has any, and the EMA."""
        reshard(self.policy.transformer)
        ema = {"ema": self.ema.values} if self.ema else {}
        parameters = self.policy.trained_parameters()
        moments = {
            name: self.optimizer.state[parameter] for name, parameter in parameters.items() if parameter in self.optimizer.state
        }
        return {"weights": {name: parameter.detach() for name, parameter in parameters.items()}, "moments": moments, **ema}

    def result(self) -> AbstractContextManager:
        """Within the block, the policy has the weights that are evaluated and kept: the EMA's if there is one. Collective."""
        return self.ema.in_place() if self.ema else nullcontext()

    def restore(self, load: Callable[[dict], None], updated: bool) -> None:
        """Restore a state; load: reads it into the tensors that it is given; updated: whether the optimizer had made a step."""
        if updated:
            for parameter in self.parameters:  # as AdamW lays them out
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        load(self.state())
        self.policy.refresh()

    def _stop_if_asked(self) -> None:
        """Raise Terminated if SIGTERM came; called while the iteration has not changed the weights, so that a checkpoint can be written."""
        if self.processes.first("asked" if self.termination.requested else None):
            raise Terminated


class Ema:
    """The average of the policy's trained parameters, float32, spread over the processes as they are.

    `values`: name -> average, at first the weights themselves. As in flow_grpo's `ema.py`, the decay of step n (from 0) is
    min((1 + n) / (10 + n), `settings.decay`), so that the first weights are soon forgotten.
    """

    def __init__(self, policy: Policy, settings: EmaSettings):
        self.policy, self.settings = policy, settings
        reshard(policy.transformer)
        self.values = {name: parameter.detach().clone() for name, parameter in policy.trained_parameters().items()}

    def update(self, step: int) -> None:
        """Add the weights after the run's optimizer step `step`, from 0, if that is the last of every `settings.every`."""
        if (step + 1) % self.settings.every == 0:
            decay = min((1 + step) / (10 + step), self.settings.decay)
            averages, weights = self._parts()
            get_ema_multi_avg_fn(decay)(averages, weights, None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the policy and the rollouts' replica have the average.

        Afterwards they have their own weights again, bit for bit. Collective.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            for average, weight in zip(*self._parts()):
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
        self.policy.refresh()

    def _parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this process's part of each average and of each weight."""
        reshard(self.policy.transformer)
        local = lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        weights = self.policy.trained_parameters()
        return [local(value) for value in self.values.values()], [local(weights[name].detach()) for name in self.values]
