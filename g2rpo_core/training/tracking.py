"""Shows a run while it goes on: curves and sample pictures in TensorBoard or another tracker, by accelerate's interface.

Nothing here changes the result of a run, and no stage reads it. The files are in LIVE, outside what DVC hashes.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image, ImageDraw
from torchvision.transforms.functional import to_pil_image, to_tensor
from torchvision.utils import make_grid

from g2rpo_core.errors import UserError
from g2rpo_core.texts import visible
from g2rpo_core.training.settings import TrackingSettings

LIVE = Path(".cache", "live")
CAPTION = 14  # pixels under a picture
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow", "dvclive": "dvclive"}


class Tracking:
    """Logs each iteration of the run `name` to every tracker; only in the first process.

    first: the iteration after which a resumed run begins; what was logged of later ones is removed if the tracker can do that.
    UserError if a tracker is not installed.
    """

    def __init__(self, name: str, settings: TrackingSettings, first: int = 0, folder: Path = LIVE):
        if missing := [one for one in settings.to if not installed(one)]:
            raise UserError(f"training.tracking.to: {missing[0]} is not installed: pip install {missing[0]}, or leave it out")
        PartialState()  # accelerate's trackers ask it which process this is
        self.folder = folder / name
        self.before: Mapping | None = None  # the record before
        self.told: set[str] = set()  # failures that were already reported
        self.trackers: list[GeneralTracker] = []
        for one in settings.to:
            with self.at_most_a_warning(one):
                tracker = _tracker(one, name, folder, first)
                tracker.start()
                self.trackers.append(tracker)

    def warn(self, iteration: int, text: str) -> None:
        """Logs a warning of the run, as text if the tracker takes text."""
        for tracker in self.trackers:
            with self.at_most_a_warning(tracker.name):
                tracker.log({"training/warning": text}, step=iteration)

    @contextmanager
    def at_most_a_warning(self, what: str) -> Iterator[None]:
        """A failure in the display never ends a training: it is reported once, in one line, and skipped."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - trackers reach for disks, networks and libraries of all kinds
            if what not in self.told:
                self.told.add(what)
                words = visible(f"{type(error).__name__}: {error}")[:300]
                with suppress(OSError):  # of a stderr that nobody reads any more
                    print(f"warning: {what} could not be shown ({words}); training goes on without it", file=sys.stderr)

    def record(self, record: Mapping, num_images: int) -> None:
        """Logs an iteration's record as curves by topic, with its speed and memory; num_images: images that it sampled."""
        with self.at_most_a_warning("a record"):
            self._record(record, num_images)
        self.before = record

    def _record(self, record: Mapping, num_images: int) -> None:
        values = {f"{topic(key)}/{key}": value for key, value in record.items() if key != "iteration" and math.isfinite(value)}
        if self.before and (seconds := record["seconds"] - self.before["seconds"]) > 0:
            values["speed/seconds_per_iteration"] = seconds
            values["speed/images_per_second"] = num_images / seconds
            values["speed/nfe_per_second"] = (record["num_forward_evals"] - self.before["num_forward_evals"]) / seconds
        values["memory/host_gib"] = psutil.Process().memory_info().rss / 2**30
        if torch.cuda.is_available():
            values["memory/gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        for tracker in self.trackers:
            with self.at_most_a_warning(tracker.name):
                tracker.log(values, step=record["iteration"])

    def samples(self, iteration: int, images: torch.Tensor, prompts: Sequence[str]) -> None:
        """Logs images [N, 3, H, W] of fixed prompts and noise, each below that of the model before training (iteration 0)."""
        with self.at_most_a_warning("the sample pictures"):
            base = self.folder / "base.png"
            now = _row(images, prompts)
            if iteration == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                now.save(base)
            self._show("samples", "samples: the base, and now", iteration, [Image.open(base), now] if base.exists() else [now])

    def group(self, iteration: int, images: torch.Tensor, rewards: Mapping[str, Sequence[float]], prompt: str) -> None:
        """Logs images [G, 3, H, W] of one group, each with its rewards, and the prompt below all."""
        with self.at_most_a_warning("the pictures of a group"):
            captions = [" ".join(f"{values[index]:.3f}" for values in rewards.values()) for index in range(len(images))]
            self._show("group", f"a group's {', '.join(rewards)}", iteration, [_row(images, captions), _text(prompt, 400)])

    def finish(self) -> None:
        for tracker in self.trackers:
            with self.at_most_a_warning(tracker.name):
                tracker.finish()

    def _show(self, name: str, title: str, iteration: int, rows: list[Image.Image]) -> None:
        whole = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), "white")
        top = 0
        for row in rows:
            whole.paste(row, (0, top))
            top += row.height
        self.folder.mkdir(parents=True, exist_ok=True)
        whole.save(self.folder / f"{name}-{iteration:06d}.png")
        for tracker in self.trackers:
            with self.at_most_a_warning(tracker.name):
                _show_picture(tracker, name, title, whole, iteration)


def installed(tracker: str) -> bool:
    """Whether a tracker of `TrackingSettings.to` can be used here."""
    return find_spec(MODULES[tracker]) is not None


def topic(key: str) -> str:
    """The group of curves that a record's column belongs to."""
    for start, name in (
        ("heldout_", "held out"),
        ("reward_", "rewards"),
        ("gap_", "granularities"),
        ("correlation_", "granularities"),
    ):
        if key.startswith(start):
            return name
    return "cost" if key.startswith("num_") or key == "seconds" else "training"


def _tracker(kind: str, name: str, folder: Path, first: int) -> GeneralTracker:
    """A tracker of the run `tiny/g2rpo-1`; in trackers with projects, this is the run g2rpo-1 in the project g2rpo-tiny.

    Only TensorBoard can remove what was logged after a checkpoint; in the others a resumed run appears beside the earlier one.
    """
    make = LOGGER_TYPE_TO_CLASS[kind]
    if kind == "tensorboard":
        return make(name, logging_dir=folder, purge_step=first or None)
    if kind == "dvclive":  # by default it would rewrite dvc.yaml
        return make(name, dir=str(folder / name / "dvclive"), dvcyaml=None, save_dvc_exp=False)
    above, _, run = name.rpartition("/")
    project = "-".join(filter(None, ["g2rpo", *above.split("/")]))
    (folder / name).mkdir(parents=True, exist_ok=True)
    if kind == "mlflow":  # by default its database would be in the checkout
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        return make(project, logging_dir=(folder / name / "mlflow").resolve().as_uri(), run_name=run)
    return make(project, name=run, **({"dir": str(folder / name)} if kind == "wandb" else {}))


def _show_picture(tracker: GeneralTracker, name: str, title: str, image: Image.Image, step: int) -> None:
    """Uses the tracker's own interface if accelerate has none for pictures."""
    if tracker.name == "tensorboard":
        tracker.log_images({title: to_tensor(image)[None]}, step=step)
    elif tracker.name == "wandb":
        tracker.log_images({title: [image]}, step=step)
    elif tracker.name == "trackio":
        tracker.log({title: import_module("trackio").Image(image)}, step=step)
    elif tracker.name == "mlflow":
        import_module("mlflow").log_image(image, key=name, step=step)
    elif tracker.name == "dvclive":
        tracker.live.log_image(f"{name}.png", image)


def _row(images: torch.Tensor, captions: Sequence[str]) -> Image.Image:
    """Pictures side by side, small ones enlarged, each with a caption."""
    scale = max(1, 128 // images.shape[-1])
    large = images.detach().float().cpu().repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    row = to_pil_image(make_grid(large, nrow=len(images), padding=2, pad_value=1.0))
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
