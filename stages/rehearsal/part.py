"""Runs one stage as one of many processes, at true size and without data: `python -m stages.rehearsal.part`, in its own process.

The stage's own `main` runs, from its command line to its last file. What this machine lacks is replaced: the GPUs and the other
processes (`pretend`), and the contents of weights and of their files. Prints one JSON line.
"""

from stages.rehearsal import pretend  # isort: skip - before torch

import argparse
import hashlib
import json
import os
import shutil
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers.models.modeling_utils as modeling
import open_clip.factory
import torch
import transformers
from diffusers import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import stages.embed
import stages.evaluate
import stages.train
from g2rpo_core.bases.base import Base
from g2rpo_core.config import load_profile, training_of
from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.estimate import published
from g2rpo_core.estimate.bases import shape_of
from g2rpo_core.models import loading, policy
from g2rpo_core.rewards import image_reward, registry
from g2rpo_core.rewards.spec import ModelSize
from g2rpo_core.training import batch, experience, trainer
from stages.rehearsal.meter import GIB, Meter

STAGES = {"embed": stages.embed, "train": stages.train, "resume": stages.train, "evaluate": stages.evaluate}
written: Counter = Counter()  # bytes that would be on disk, by what they are
calls = [0]  # forward and backward passes of all updates, including those that are left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    for name, kind in (
        ("home", Path),
        ("profile", str),
        ("method", str),
        ("gpus", int),
        ("nodes", int),
        ("memory", float),
        ("rank", int),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    meter = Meter(args.memory * GIB, args.gpus // args.nodes)
    base = prepare(args)
    replace_machine(args, meter)
    replace_files(meter)
    shorten_updates(meter)
    name_phases(meter, base)
    words = ["--profile", args.profile]
    if args.stage != "embed":
        words += ["--method", args.method, "--seed", "0"]
    sys.argv = [args.stage, *words]
    ended = None
    try:
        with pretend.WithoutData(), meter:
            STAGES[args.stage].main()
    except BaseException as error:  # noqa: BLE001 - whatever ends a stage is reported
        if not isinstance(error, SystemExit) or error.code:
            ended = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    print(json.dumps(report(args, meter, ended)))
    sys.stdout.flush()
    os._exit(0 if ended is None else 1)


def report(args: argparse.Namespace, meter: Meter, ended: str | None) -> dict:
    kinds: Counter = Counter()
    for one in meter.collectives:
        key = one.phase, one.name, one.group, one.between_nodes
        for what, value in {"calls": 1, "bytes": one.bytes, "sent": one.sent}.items():
            kinds[*key, what] += value
    collectives = [
        {"phase": phase, "name": name, "group": group, "between_nodes": between}
        | {what: kinds[phase, name, group, between, what] for what in ("calls", "bytes", "sent")}
        for phase, name, group, between in dict.fromkeys(key[:4] for key in kinds)
    ]
    phases = {
        name: {"gpu": phase.peak["cuda"], "host": phase.peak["cpu"], "flops": phase.flops, "seconds": phase.seconds}
        for name, phase in meter.phases.items()
    }
    order = [(one.phase, one.name, one.group, one.bytes) for one in meter.collectives]
    return {
        "stage": args.stage, "rank": args.rank, "ended": ended, "phases": phases, "collectives": collectives,
        "order": hashlib.sha256(repr(order).encode()).hexdigest(), "written": dict(written), "updates": calls[0],
    }  # fmt: skip


def prepare(args: argparse.Namespace) -> Base:
    """Makes the folder in which the stage runs in this process, with the outputs of earlier stages (`inputs`); the base model."""
    profile = load_profile(args.home / "profiles" / f"{args.profile}.yaml")
    base, _ = shape_of(profile)
    own = f"train-{args.method}" if args.stage == "resume" else f"{args.stage}-{args.method}"
    cwd = args.home / f"{own}-{args.rank}"
    if args.stage != "resume":
        shutil.rmtree(cwd, ignore_errors=True)
        cwd.mkdir()
    for source in [args.home / "profiles", *(args.home / "inputs").glob("*/*")]:
        link = cwd / source.relative_to(args.home if source.name == "profiles" else args.home / "inputs")
        link.parent.mkdir(exist_ok=True)
        if not link.exists():
            link.symlink_to(source.resolve())
    os.chdir(cwd)
    run = Path("runs", args.profile, f"{args.method}-0")
    if args.stage == "evaluate" and args.method != "base":
        lora = training_of(profile.training, profile.methods, args.method).lora
        weights = run / ("lora" if lora else "transformer")
        weights.mkdir(parents=True, exist_ok=True)
        (run / "records.parquet").touch()
        shutil.copy(Path("models", args.profile, "pipeline", "transformer", "config.json"), weights)
        if lora:
            config = loading.lora_config(base, lora)

            def load_lora(_, transformer: ModelMixin, *__) -> None:
                transformer.add_adapter(config)
                for name, parameter in transformer.named_parameters():
                    if ".lora_" in name:
                        parameter.data = parameter.data.float()

            policy.load_lora = load_lora
    return base


def replace_machine(args: argparse.Namespace, meter: Meter) -> None:
    """Replaces the GPUs, and the other processes, which answer as this one does."""
    local, per = args.rank % (args.gpus // args.nodes), args.gpus // args.nodes
    pretend.gpus(per, local, args.memory)

    def join_processes(asked) -> tuple[ProcessGroup, torch.device]:
        size = 1 if args.stage == "embed" else args.gpus
        if size > 1:
            pretend.process_of(args.rank, size)
        return ProcessGroup(args.rank if size > 1 else 0, size), torch.device("cuda", local)

    def gather(group: ProcessGroup, value: Any) -> list:
        if (
            group.size > 1 and isinstance(value, dict) and value and all(isinstance(key, int) for key in value)
        ):  # batches by number: each has some
            return [{number: next(iter(value.values()))} for number in range(group.size)]
        return [value] * group.size

    stages.train.join_processes = stages.evaluate.join_processes = join_processes
    ProcessGroup.gather = gather
    scratch = checkpoint.scratch
    checkpoint.scratch = lambda stage, name, settings, dependencies, processes=None: scratch(stage, name, settings, [])
    plain_velocity, plain_decode = policy.Policy._velocity, AutoencoderKL.decode

    def velocity_of(own, transformer, conditioning):
        real = plain_velocity(own, transformer, conditioning)

        def velocity(latents, *rest):
            if torch.is_grad_enabled():
                return real(latents, *rest)
            key = (meter.phase, id(transformer), tuple(latents.shape))
            return meter.sometimes(key, lambda: real(latents, *rest), lambda: torch.empty_like(latents))

        return velocity

    def decode(vae, latents, return_dict=True, generator=None):
        shape = (len(latents), 3, *(8 * side for side in latents.shape[2:]))
        really = lambda: plain_decode(vae, latents, return_dict=False)
        return meter.sometimes(("vae", meter.phase, tuple(latents.shape)), really, lambda: (latents.new_empty(shape),))

    policy.Policy._velocity, AutoencoderKL.decode = velocity_of, decode


def counted(size: ModelSize, device: torch.device) -> Callable[..., torch.Tensor]:
    """UnifiedReward by its model's size: the length of its answers depends on what it reads, and here it reads nothing."""
    weights = torch.empty(size.bytes, dtype=torch.uint8, device=device)

    def score(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        torch.empty(min(size.at_once, len(images)) * size.bytes_per_image, dtype=torch.uint8, device=weights.device)
        return torch.zeros(len(prompts))

    return score


def replace_files(meter: Meter) -> None:
    """Makes weights from their configuration instead of reading files, and counts those that are written."""

    def of_diffusers(cls, folder, dtype=torch.float32, **_):
        return cls.from_config(cls.load_config(folder)).to(dtype).eval()

    def of_transformers(cls, folder, *_, dtype=torch.float32, config=None, subfolder="", **__):
        return cls(cls.config_class.from_pretrained(Path(folder, subfolder))).to(dtype).eval()

    ModelMixin.from_pretrained = classmethod(of_diffusers)
    transformers.PreTrainedModel.from_pretrained = classmethod(of_transformers)
    transformers.PreTrainedModel.initialize_weights = lambda model: None  # it draws until the values are within bounds
    open_clip.factory.load_checkpoint = lambda *_, **__: {}
    loading.read_weights = lambda *_: None

    def model_of_image_reward(*_):
        from transformers import BlipTextConfig, BlipVisionConfig

        text = BlipTextConfig(**published.IMAGE_REWARD_TEXT, encoder_hidden_size=1024, is_decoder=True)
        return image_reward.ImageRewardModel(BlipVisionConfig(**published.IMAGE_REWARD_IMAGE), text)

    image_reward.load_file, image_reward.from_checkpoint = (lambda *_: {}), model_of_image_reward
    plain_build = registry._build

    def build(name, models, device, section):
        spec = registry.REWARDS.get(name)
        if spec is None or spec.size is None or registry.settings_of(section, name).remote:
            return lambda images, prompts: torch.zeros(len(prompts))  # a server's, or the user's own: costs nothing here
        own = {key: value for key, value in section.get(name, {}).items() if key != "backend"}  # a package's model is as large
        return counted(spec.size, device) if name == "unified_reward" else plain_build(name, models, device, {name: own})

    registry._build = build

    def size_of(tree: object) -> int:
        tensors = [
            one.to_local() if isinstance(one, DTensor) else one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def save_file(tensors, path, **_):
        written["weights"] += size_of(tensors)
        Path(path).touch()

    modeling.safetensors.torch.save_file = save_file

    class Checkpoints(checkpoint.Checkpoints):
        """Takes the memory of the copy that is made before writing, and leaves the records for a rehearsal that resumes."""

        def __init__(self, folder: Path, keep: int, processes: ProcessGroup = ProcessGroup()):  # noqa: B008
            self.folder = folder
            self.copies: list[torch.Tensor] = []

        def save(self, iteration: int, state: dict, records: list[dict]) -> None:
            written["checkpoint"] = size_of(state)
            tensors = [one.to_local() if isinstance(one, DTensor) else one for one in tree_leaves(state)]
            self.copies = [torch.empty(one.shape, dtype=one.dtype) for one in tensors if isinstance(one, torch.Tensor)]
            (last := self.folder / f"iteration-{iteration:06}").mkdir(parents=True, exist_ok=True)
            (last / checkpoint.RECORDS).write_text(json.dumps(records))

        def publish(self) -> None: ...

        def finish(self) -> None:
            self.copies = []

    checkpoint.Checkpoints = Checkpoints
    checkpoint.load_records = lambda path, processes=None: json.loads((path / checkpoint.RECORDS).read_text())
    checkpoint.load_state = lambda path, state, processes=None: None
    checkpoint.discard = lambda folder: None
    checkpoint.publish = checkpoint.replace = lambda folder, output: None
    checkpoint.claim = checkpoint.check_room = lambda *_: None


def shorten_updates(meter: Meter) -> None:
    """Makes only the first two and the last of an update's calls; those in between count as the second."""
    plain_split, plain_update, plain_reduce = batch.TransitionBatch.split, trainer.Trainer.update, trainer.reduce_gradients
    left_out, starts = [0], []

    def split(whole, size):
        parts = list(plain_split(whole, size))
        left_out[0] += max(0, len(parts) - 3)
        calls[0] += len(parts)
        return parts if len(parts) <= 3 else [*parts[:2], parts[-1]]

    def reduce_gradients(*arguments):  # called before every call
        starts.append(meter.so_far())
        plain_reduce(*arguments)

    def update(*arguments, **more):
        left_out[0] = 0
        starts.clear()
        result = plain_update(*arguments, **more)
        if left_out[0]:
            meter.repeat(starts[1], starts[2], left_out[0])
        return result

    batch.TransitionBatch.split, trainer.Trainer.update, trainer.reduce_gradients = split, update, reduce_gradients


def name_phases(meter: Meter, base: Base) -> None:
    """Says which function belongs to which phase; the innermost phase counts."""
    owned: list[tuple[Any, str, str]] = [
        (policy.Policy, "load", "load"),
        (policy.Policy, "load_to_train", "load"),
        (registry, "load", "load"),
        (base.pipeline, "from_pretrained", "load"),
        (experience.RolloutSampler, "__call__", "rollout"),
        (policy.Policy, "decode", "decode"),
        (experience, "score_all", "score"),
        (trainer.Trainer, "update", "update"),
        (torch.optim.AdamW, "step", "optimizer"),
        (stages.train, "heldout_means", "monitor"),
        (checkpoint.Checkpoints, "save", "save"),
        (policy.Policy, "save", "save"),
        (trainer.Trainer, "restore", "resume"),
        (stages.evaluate, "evaluate_batch", "evaluate"),
        (base.pipeline, "encode_prompt", "embed"),
    ]
    for owner, name, phase in owned:
        raw = vars(owner).get(name) or getattr(owner, name)
        if isinstance(raw, classmethod):
            setattr(owner, name, classmethod(meter.during(phase, raw.__func__)))
        else:
            bound = isinstance(owner, type) and getattr(raw, "__self__", None) is owner  # a class method that is inherited
            setattr(owner, name, classmethod(meter.during(phase, raw.__func__)) if bound else meter.during(phase, raw))


if __name__ == "__main__":
    main()
