"""Shows a run while it trains: a progress bar, warnings on stderr, and curves and images.

Curves and images go to TensorBoard or another tracker. Nothing here changes the result of a run or
ends it: a stderr that nobody reads any more is ignored, as is a tracker that fails. No stage reads
the trackers' files, which are in LIVE, outside what DVC hashes.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import psutil
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image, ImageDraw
from torchvision.transforms.functional import to_tensor
from torchvision.utils import make_grid

from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.progress import Bar
from g2rpo_core.foundation.texts import echo, visible
from g2rpo_core.models.generate import generate_images
from g2rpo_core.numerics.cuda import peak_bytes
from g2rpo_core.numerics.processes import device_of
from g2rpo_core.rewards.preprocess import pil_images
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.tracking.utilization import Share, share_of_peak
from g2rpo_core.training.trainer import Trainer

Setting = bool | int | float | str

LIVE = Path(".cache", "live")
CAPTION = 14  # pixels under an image


class Display:
    """The display of the run `name`, such as tiny/g2rpo-1; only the first process shows anything.

    prompts: those of the sample images; first: the iteration after which a resumed run begins, so
    that TensorBoard hides what was logged of later ones. UserError if a tracker is not installed.
    """

    def __init__(self, name: str, trainer: Trainer, prompts: EmbeddingStore, first: int):
        self.name, self.trainer, self.prompts = name.rpartition("/")[2], trainer, prompts
        self.settings = trainer.training.tracking
        self.quiet = trainer.processes.rank > 0
        self.folder = LIVE / name
        self.before: Mapping | None = None  # the record before
        self.share: Share | None = None  # of the peak, where that is known
        self.reported: set[str] = set()  # failures
        self.trackers: list[GeneralTracker] = []
        if not self.quiet:
            self._start_trackers(name, first)
        self.bar = Bar(
            total=trainer.training.iterations,
            initial=first,
            desc=self.name,
            unit="iteration",
            disable=self.quiet,
        )

    def _start_trackers(self, name: str, first: int) -> None:
        """Start them, and tell them the run's settings, by which their pages compare runs."""
        if lacking := next(filter(None, map(not_installed, self.settings.to)), None):
            raise UserError(f"training.tracking.to: {lacking}")
        PartialState()  # accelerate's trackers ask it which process this is
        for kind in self.settings.to:
            with self.at_most_a_warning(kind):
                tracker = _tracker(kind, name, LIVE, first)
                tracker.start()
                self.trackers.append(tracker)
        if self.trackers:
            with self.at_most_a_warning("the share of the peak"):
                self.share = share_of_peak(self.trainer)
            self._tell(lambda tracker: _configure(tracker, settings_of(self.trainer)))

    @contextmanager
    def at_most_a_warning(self, what: str) -> Iterator[None]:
        """Report a failure of the display once, in one line: it never ends a training."""
        try:
            yield
        # Trackers reach for disks, networks and libraries of all kinds
        except Exception as error:  # noqa: BLE001
            if what not in self.reported:
                self.reported.add(what)
                words = visible(f"{type(error).__name__}: {error}")[:300]
                with suppress(OSError):  # of a stderr that nobody reads any more
                    echo(
                        f"warning: {what} could not be shown ({words}); training continues",
                        file=sys.stderr,
                    )

    def _tell(self, tell: Callable[[GeneralTracker], None]) -> None:
        """Tell every tracker something, of which one may fail."""
        for tracker in self.trackers:
            with self.at_most_a_warning(tracker.name):
                tell(tracker)

    def group(
        self, iteration: int, prompt: str, images: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Show a group's images [G, 3, H, W] with their scores [R, G], if images are due.

        Each image has its scores below it, and the prompt is below all.
        """
        if self.quiet or not self.settings.samples_due(iteration):
            return
        with self.at_most_a_warning("the images of a group"):
            captions = [" ".join(f"{score:.3f}" for score in own) for own in scores.T.tolist()]
            self._show(
                "group",
                f"a group's {', '.join(self.trainer.rewards)}",
                iteration,
                [_row(images, captions), _text(prompt, 400)],
            )

    def record(self, record: dict) -> None:
        """Show an iteration's record, and samples if they are due; collective."""
        with suppress(OSError):
            if record["num_forward_evals"]:
                rewards = {
                    reward: f"{record[f'reward_{reward}']:.3f}" for reward in self.trainer.rewards
                }
                self.bar.set_postfix(
                    rewards | {"NFE/s": round(record["num_forward_evals"] / record["seconds"])}
                )
            self.bar.update(record["iteration"] - self.bar.n)
        if self.trackers:
            with self.at_most_a_warning("a record"):
                values = self._curves(record)
                self._tell(lambda tracker: tracker.log(values, step=record["iteration"]))
        self.before = record
        if self.settings.samples and self.settings.samples_due(record["iteration"]):
            self._samples(record["iteration"], self.settings.samples.prompts)

    def _curves(self, record: Mapping) -> dict[str, float]:
        """Return a record's finite numbers by topic, with the run's speed and memory."""
        values = {
            f"{topic(key)}/{key}": value
            for key, value in record.items()
            if key != "iteration" and math.isfinite(value)
        }
        # Speed since the record before, and memory
        if self.before and (seconds := record["seconds"] - self.before["seconds"]) > 0:
            values["speed/seconds_per_iteration"] = seconds
            values["speed/images_per_second"] = self.trainer.num_images / seconds
            values["speed/nfe_per_second"] = (
                record["num_forward_evals"] - self.before["num_forward_evals"]
            ) / seconds
            if self.share:
                values["perf/mfu"] = self.share(self.before, record)
        values["memory/host_gib"] = psutil.Process().memory_info().rss / 2**30
        if peak := peak_bytes(device_of(None)):
            values["memory/gpu_peak_gib"] = peak[0] / 2**30
        return values

    def _samples(self, iteration: int, count: int) -> None:
        """Sample the first `count` prompts by all processes: sharded weights need every one.

        Their noise is fixed; they are shown below those of iteration 0.
        """
        sampling = self.trainer.sampling
        options = (count, even_sigmas(sampling.steps, sampling.shift), 0, sampling.decode_batch)
        with self.trainer.result():
            batches = list(generate_images(self.trainer.policy, self.prompts, *options))
        if self.quiet:
            return
        with self.at_most_a_warning("the sample images"):
            base = self.folder / "base.png"
            texts = [prompt.text for part, _ in batches for prompt in part]
            now = _row(torch.cat([images for _, images in batches]), texts)
            if iteration == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                now.save(base)
            self._show(
                "samples",
                "samples: the base, and now",
                iteration,
                [Image.open(base, formats=["PNG"]), now] if base.exists() else [now],
            )

    def _show(self, name: str, title: str, iteration: int, rows: list[Image.Image]) -> None:
        whole = Image.new(
            "RGB", (max(row.width for row in rows), sum(row.height for row in rows)), "white"
        )
        top = 0
        for row in rows:
            whole.paste(row, (0, top))
            top += row.height
        self.folder.mkdir(parents=True, exist_ok=True)
        whole.save(self.folder / f"{name}.png")
        self._tell(lambda tracker: _show_image(tracker, title, whole, iteration))

    def note(self, text: str) -> None:
        """Show a line that is no warning."""
        if not self.quiet:
            with suppress(OSError), Bar.external_write_mode(file=sys.stderr):
                echo(f"{self.name}: {text}", file=sys.stderr)

    def warn(self, iteration: int, text: str) -> None:
        """Show a warning of `drift.py`, also as text in the trackers that take text."""
        if not self.quiet:
            with suppress(OSError), Bar.external_write_mode(file=sys.stderr):
                echo(f"warning: {self.name}, iteration {iteration}: {text}", file=sys.stderr)
        self._tell(lambda tracker: tracker.log({"training/warning": text}, step=iteration))

    def finish(self) -> None:
        """End the trackers and the progress bar."""
        self._tell(lambda tracker: tracker.finish())
        with suppress(OSError):
            self.bar.close()


def not_installed(tracker: str) -> str | None:
    """Say in one line how to get a tracker of `TrackingSettings.to`; None if it is installed."""
    if find_spec(tracker):
        return None
    package = "'g2rpo[track]'" if tracker == "tensorboard" else tracker
    return f"{tracker} is not installed: pip install {package}, or leave it out"


def settings_of(trainer: Trainer) -> dict[str, Setting]:
    """Return what decides a run's numbers, by names such as training.learning_rate."""
    parts = {"method": trainer.method, "sampling": trainer.sampling, "training": trainer.training}
    nested = {name: part.deciding() for name, part in parts.items()} | {"seed": trainer.seed}
    (flat,) = pd.json_normalize(nested).to_dict("records")
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in flat.items()
    }


def topic(key: str) -> str:
    """Return the group of curves that a record's column belongs to."""
    topics = {
        "heldout_": "held out",
        "reward_": "rewards",
        "gap_": "granularities",
        "correlation_": "granularities",
        "num_": "cost",
        "seconds": "cost",
    }
    return next((name for start, name in topics.items() if key.startswith(start)), "training")


def _tracker(kind: str, name: str, folder: Path, first: int) -> GeneralTracker:
    """Return a tracker of the run `tiny/g2rpo-1`: g2rpo-1, in the project g2rpo-tiny if it has any.

    Only TensorBoard can remove what was logged after a checkpoint; in the others a resumed run
    appears as another run.
    """
    make = LOGGER_TYPE_TO_CLASS[kind]
    if kind == "tensorboard":
        return make(name, logging_dir=folder, purge_step=first)
    if kind == "dvclive":  # by default it would rewrite dvc.yaml
        return make(name, dir=str(folder / name / "dvclive"), dvcyaml=None, save_dvc_exp=False)
    above, _, run = name.rpartition("/")
    project = "-".join(filter(None, ["g2rpo", *above.split("/")]))
    (folder / name).mkdir(parents=True, exist_ok=True)
    if kind == "mlflow":  # by default its database would be in the checkout
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        return make(
            project, logging_dir=(folder / name / "mlflow").resolve().as_uri(), run_name=run
        )
    return make(project, name=run, **({"dir": str(folder / name)} if kind == "wandb" else {}))


def _configure(tracker: GeneralTracker, settings: dict[str, Setting]) -> None:
    if tracker.name == "tensorboard":  # accelerate would write them as another run
        hparams = import_module("torch.utils.tensorboard.summary").hparams
        for summary in hparams(settings, {}):
            tracker.writer.file_writer.add_summary(summary)
    else:
        tracker.store_init_configuration(settings)


def _show_image(tracker: GeneralTracker, title: str, image: Image.Image, step: int) -> None:
    """Log an image to the trackers that accelerate logs images to."""
    if tracker.name == "tensorboard":
        # Groups are shown in the order of their names: pictures after all curves
        tracker.log_images({f"training pictures/{title}": to_tensor(image)[None]}, step=step)
    elif tracker.name == "wandb":
        tracker.log_images({title: [image]}, step=step)


def _row(images: torch.Tensor, captions: Sequence[str]) -> Image.Image:
    """Lay out images [N, 3, H, W] side by side, small ones enlarged, each with a caption."""
    scale = max(1, 128 // images.shape[-1])
    large = images.detach().float().cpu().repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    grid = make_grid(large, nrow=len(images), padding=2, pad_value=1.0)
    (row,) = pil_images(grid[None])
    whole = Image.new("RGB", (row.width, row.height + CAPTION), "white")
    whole.paste(row)
    for index, caption in enumerate(captions):
        width = large.shape[-1] + 2
        whole.paste(_text(caption, width - 4), (2 + index * width, row.height))
    return whole


def _text(text: str, width: int) -> Image.Image:
    image = Image.new("RGB", (width, CAPTION), "white")
    ImageDraw.Draw(image).text((0, 1), visible(text), fill="black")
    return image
