"""Online RL of a policy, any method, one loop. The data's way through an iteration:

    prompts -> rollout -> images -> rewards [R, P, B, J, G] -> advantages [P, B, G]     (experience.py, batch.py)
            -> transition batches: N states, M next states each -> clipped loss          (batch.py, algorithm/loss.py)
            -> one or more optimizer steps -> a record                                   (metrics.py)

R rewards, P prompts of this process, B branches of the rollout's tree, J granularities, G members of a group.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from g2rpo_core.algorithm.loss import clipped_loss, masked_loss, normalized_ratio, ratio
from g2rpo_core.algorithm.methods import Method
from g2rpo_core.common.seeding import seed_of
from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore
from g2rpo_core.data.prompts import prompt_order
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.distributed.termination import Terminated, Termination
from g2rpo_core.models.parallelize import apply_gradient_checkpointing, reduce_gradients, reshard
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.rollout.rollout import SampledTransition, Velocity
from g2rpo_core.sampling.schedule import shifted_sigmas
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.sampling.transitions import Transition
from g2rpo_core.training.batch import (
    TrainedTransition,
    TransitionBatch,
    drawn_by_members,
    noise_weights,
    split_updates,
    transition_advantages,
    transition_batches,
)
from g2rpo_core.training.ema import Ema
from g2rpo_core.training.experience import NonFiniteError, RolloutSampler, score_gains, score_rollout
from g2rpo_core.training.metrics import START, reward_metrics, update_metrics
from g2rpo_core.training.settings import TrainingSettings


def learning_rate_at(iteration: int, training: TrainingSettings) -> float:
    """The learning rate of an iteration, from 0: constant, or falling linearly to 0 after the last."""
    if training.lr_scheduler == "constant":
        return training.learning_rate
    return training.learning_rate * (1 - iteration / training.iterations)


class Trainer:
    """Trains `policy.transformer` in place.

    rewards: those that `training.rewards` weighs, in its order; prompts: the encoded training prompts; seed: decides the order of
    the prompts, all noise and the drawn steps. processes: each takes its share of every iteration's prompts, whole groups; what
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
        self.processes, self.termination = processes, termination or Termination()
        self.sampler = RolloutSampler(policy, method, sampling, training.num_generations, seed)
        self.watch: Callable[[int, str, torch.Tensor, torch.Tensor], None] | None = (
            None  # an iteration's first group, see score_rollout
        )
        self.num_images = 0  # that the last iteration sampled, of all processes
        self.weights_unchanged = True  # whether the weights are those with which the iteration began
        self.sigmas = shifted_sigmas(sampling.steps, sampling.shift).to(policy.device)
        self.transition = method.transition(self.sigmas)
        self.parameters = list(policy.trained_parameters().values())
        self.optimizer = torch.optim.AdamW(self.parameters, training.learning_rate, weight_decay=training.weight_decay)
        policy.transformer.train()
        if training.gradient_checkpointing:
            apply_gradient_checkpointing(policy.transformer)
        if method.kl_coef:
            policy.keep_base()
        self.ema = Ema(policy, training.ema) if training.ema else None

    def run(self, last: Mapping = MappingProxyType(START)) -> Iterator[dict]:
        """Yields the record of each iteration after that of `last`, after its updates; docs/metrics.md lists its columns.

        The iteration's number decides its prompts, noise, window and learning rate; beyond that, a resumed run only needs the
        weights and the optimizer (`state`). Raises Terminated after SIGTERM, before the iteration has changed the weights.
        """
        num_forward_evals, num_transitions, seconds = last["num_forward_evals"], last["num_transitions"], last["seconds"]
        for iteration in range(last["iteration"], self.training.iterations):
            start = time.perf_counter()
            record = self.iterate(iteration)
            num_forward_evals += record.pop("num_forward_evals")
            num_transitions += record.pop("num_transitions")
            seconds += time.perf_counter() - start  # what the caller does between iterations does not count
            totals = {"num_forward_evals": num_forward_evals, "num_transitions": num_transitions, "seconds": seconds}
            yield {"iteration": iteration + 1, **totals, **record}

    def iterate(self, iteration: int) -> dict:
        """One iteration, from 0: its record, with the iteration's forward evaluations and transitions over all processes."""
        training, processes = self.training, self.processes
        self.weights_unchanged = True
        self.optimizer.param_groups[0]["lr"] = learning_rate_at(iteration, training)

        mine = processes.share(training.prompts_per_iteration)
        order = prompt_order(iteration, training.prompts_per_iteration, len(self.prompts), self.seed)
        indices = [order[index] for index in mine]
        texts = [self.prompts.prompts[index].text for index in indices]
        conditioning = self.prompts.conditioning(indices)

        sampled = self.sampler(conditioning, iteration, mine.start, before_call=self._stop_if_asked)
        score = partial(
            score_rollout, self.policy, self.rewards, texts=texts, decode_batch=self.sampling.decode_batch, iteration=iteration,
            processes=processes, before_call=self._stop_if_asked,
        )  # fmt: skip
        rewards = score(sampled, watch=partial(self.watch, iteration + 1, texts[0]) if self.watch else None)
        self.num_images = rewards[0].numel() * processes.size
        gains = score_gains(sampled, score) if sampled.around is not None else None
        advantages = transition_advantages(
            sampled.transitions, rewards, gains, self.method, list(training.rewards.values()), training.adv_clip_max, processes
        )
        transitions = self._trained(sampled.transitions, advantages, iteration, mine)
        self._stop_if_asked()
        try:
            updates = [self.update(conditioning, part) for part in split_updates(transitions, self.method.updates_per_rollout)]
        except NonFiniteError as error:
            prompts = ", ".join(map(repr, texts))
            raise NonFiniteError(f"iteration {iteration + 1}: {error}; the prompts are {prompts}") from None
        self.optimizer.zero_grad()  # frees their memory for the next rollout
        self.policy.refresh()

        every = torch.cat([each.flatten() for each in advantages])
        means = reward_metrics(list(self.rewards), rewards, every, sampled.granularities, training.adv_clip_max)
        return {
            "num_forward_evals": sampled.num_forward_evals * self.policy.forward_evals * processes.size,
            "num_transitions": sum(update["num_transitions"] for update in updates) * processes.size,
            **dict(zip(means, processes.mean(list(means.values())))),
            **update_metrics(updates),
        }

    def _trained(
        self, sampled: list[SampledTransition], advantages: list[torch.Tensor], iteration: int, prompts: range
    ) -> list[TrainedTransition]:
        """The transitions that this iteration trains on; prompts: the indices of this process's prompts among the iteration's."""
        method, count = self.method, len(sampled)
        if method.timesteps_of == "member":
            rngs = [random.Random(seed_of("trained", self.seed, iteration, index)) for index in prompts]
            drawn = drawn_by_members(method, count, self.training.num_generations, rngs).to(self.policy.device)
            chosen, weights = list(range(count)), list(drawn)
        else:
            chosen = method.trained(count, random.Random(seed_of("trained", self.seed, iteration)))
            weights = [torch.ones_like(advantages[index]) for index in chosen]
        if method.step_weights == "noise":
            by_noise = noise_weights([self._std(sampled[index]) for index in chosen])
            weights = [weight * factor for weight, factor in zip(weights, by_noise)]
        return [TrainedTransition(sampled[index], advantages[index], weight) for index, weight in zip(chosen, weights)]

    def _std(self, sampled: SampledTransition) -> float:
        """The standard deviation of the noise at a transition's SDE step, which is the same for all latents."""
        step, one = sampled.sde_step, torch.zeros(1, 1, device=self.sigmas.device)
        return float(self.transition(one, one, step=step.step, span=step.span).std)

    def update(self, conditioning: Conditioning, transitions: list[TrainedTransition]) -> dict:
        """Makes one optimizer step on the mean weighted loss over all given transitions, in as many batches as it takes (Eq. 12).

        Returns the step's metrics; NonFiniteError before the step if a number is not finite, or the old policy's ratio is not 1.
        """
        by_member = self.method.timesteps_of == "member"
        batches = transition_batches(transitions, self.processes if by_member else None)
        total = sum(int(batch.weights.count_nonzero()) if by_member else batch.weights.numel() for batch in batches)
        size = self.policy.batch_size(self.training.batch_tokens, conditioning)
        velocity = self.policy.velocity(conditioning)
        base = self.policy.base_velocity(conditioning) if self.method.kl_coef else None
        sums = []  # of every batch: loss, KL, clipped transitions, largest |ratio - 1|
        self.optimizer.zero_grad()
        parts = [part for whole in batches for part in whole.split(size)]
        for number, batch in enumerate(parts):
            self._stop_if_asked()
            reduce_gradients(self.policy.transformer, self.training.parallel.reduce == "call" or number == len(parts) - 1)
            r, loss, outside = self._policy_loss(current := self._transition(velocity, batch), batch)
            kl = torch.zeros_like(loss)
            if base:
                with torch.no_grad():
                    reference = self._transition(base, batch)
                kl = current.kl(reference)[:, None].expand_as(loss)
            ((batch.weights * (loss + self.method.kl_coef * kl)).sum() / total).backward()
            used = batch.weights > 0
            away = ((r.detach() - 1) * used).abs()
            weighted = (batch.weights * loss.detach()).sum()
            sums.append(torch.stack([weighted, (kl.detach() * used).sum(), (outside & used).sum(), away.max()]))
        loss_mean, kl_mean, clip_ratio, _ = self.processes.mean(torch.stack(sums).sum(0).div(total).tolist())
        ratio_error = max(self.processes.gather(torch.stack(sums)[:, 3].max().item()))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        self._check_update(loss_mean, norm, ratio_error, [transition.sampled.sde_step.step for transition in transitions])
        self.weights_unchanged = False
        self.optimizer.step()
        if self.ema:
            self.ema.update(int(next(iter(self.optimizer.state.values()))["step"]) - 1)
        return {
            "loss": loss_mean,
            "kl": kl_mean,
            "grad_norm": norm,
            "old_policy_ratio_error": ratio_error,
            "clip_ratio": clip_ratio,
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

    def _transition(self, velocity: Velocity, batch: TransitionBatch) -> Transition:
        """The transitions from all N states under a velocity field: one forward."""
        v = velocity(batch.latents, self.sigmas[batch.step], batch.prompt)
        return self.transition(batch.latents, v, step=batch.step, span=batch.span)

    def _policy_loss(self, current: Transition, batch: TransitionBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The ratio and loss of every transition, and whether it lies outside the trust region; each [N, M]."""
        members = batch.next_latents.shape[1]
        log_prob = current.repeat(members).log_prob(batch.next_latents.flatten(0, 1)).view(-1, members)
        divergence = lambda: current.kl(replace(current, mean=batch.mean))[:, None]
        if self.method.ratio == "plain":
            r = ratio(log_prob, batch.old_log_prob)
        else:
            r = normalized_ratio(log_prob, batch.old_log_prob, divergence(), current.std.flatten(1))
        if self.method.trust_region == "kl_mask":
            moved = divergence().detach().expand_as(r)
            loss, outside = masked_loss(r, batch.advantages, moved, self.method.kl_threshold)
        else:
            loss = clipped_loss(r, batch.advantages, self.training.clip_range)
            outside = (r.detach() - 1).abs() > self.training.clip_range
        if self.method.ratio == "normalized":  # GRPO-Guard evens out the steps' gradients by their length
            loss = loss / (self.sigmas[batch.step] - self.sigmas[batch.step + batch.span])[:, None]
        return r, loss, outside

    def state(self) -> dict[str, dict]:
        """What the iterations change, by name: the trained weights, the optimizer's moments once it has any, and the EMA."""
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
        """Restores a state; load: reads it into the tensors that it is given; updated: whether the optimizer had made a step."""
        if updated:
            for parameter in self.parameters:  # as AdamW lays them out
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        load(self.state())
        self.policy.refresh()

    def _stop_if_asked(self) -> None:
        """Called while the iteration has not changed the weights yet, so that a checkpoint can be written."""
        if self.processes.first("asked" if self.termination.requested else None):
            raise Terminated
