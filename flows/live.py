"""Shows a training in its Prefect run: where its curves and pictures are, its last rewards, and the curve so far.

Everything is read from the files that the training writes. The training knows nothing of Prefect.
"""

import json
import math
import time
from pathlib import Path
from uuid import UUID

from prefect.artifacts import create_image_artifact, create_link_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from flows.artifacts import curve_image, key_of
from stages.graph import Stage

RECORDS = "*/{run}/*/records.jsonl"  # training/loop.py's CURVE in the scratch folder of distributed/checkpoint.py, by profile
RESUME, LIVE = Path(".cache", "resume", "train"), Path(".cache", "live")  # the last of training/tracking.py
LAST_ROWS = 12


class Live:
    """The live artifacts of one stage's task; a stage that is not a training has none."""

    def __init__(self, stage: Stage):
        self.run = stage.name.partition("@")[2] if stage.group == "train" else ""
        self.project, self.name, self.since = stage.project, stage.name, time.time()
        self.artifacts: dict[str, UUID] = {}

    def update(self) -> None:
        """Updates the artifacts to the last record; does nothing before the first. httpx.HTTPError while the server is away."""
        found = self._file()
        records = read_records(found) if found else []
        if not found or not records:
            return
        curves = self.project / LIVE / found.parents[2].name / self.run
        if "live" not in self.artifacts and curves.exists():
            about = f"curves and sample pictures of {self.run}, on the machine that trains: tensorboard --logdir {LIVE}"
            self.artifacts["live"] = create_link_artifact(curves.resolve().as_uri(), self.run, key_of("live", self.name), about)
        table = [row_of(record) for record in records[: -LAST_ROWS - 1 : -1]]
        if "rewards" in self.artifacts:
            self._put("rewards", json.dumps(table))
        else:
            self.artifacts["rewards"] = create_table_artifact(
                table, key_of("rewards", self.name), f"the last iterations of {self.run}"
            )
        if image := curve_image({self.run: records}, ("reward_", "heldout_")):
            if "curve" in self.artifacts:
                self._put("curve", image)
            else:
                about = f"rewards of {self.run} so far: of training, and of held-out prompts"
                self.artifacts["curve"] = create_image_artifact(image, key_of("curve", self.name), about)

    def _put(self, name: str, data: str) -> None:
        with get_client(sync_client=True) as client:
            client.update_artifact(self.artifacts[name], ArtifactUpdate(data=data))

    def _file(self) -> Path | None:
        """The file of records that was written since the stage started, unlike that of an older attempt with other settings."""
        files = (self.project / RESUME).glob(RECORDS.format(run=self.run)) if self.run else ()
        written = {file: file.stat().st_mtime for file in files}
        newest = max(written, key=written.__getitem__, default=None)
        return newest if newest and written[newest] >= self.since - 1 else None


def read_records(file: Path) -> list[dict]:
    """Every complete line; the last may be half written, and the file is gone when the run has ended."""
    try:
        lines = file.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line]


def row_of(record: dict) -> dict:
    """An iteration's rewards as a row of the table."""
    wanted = ("reward_", "heldout_", "grad_norm", "kl", "clip_ratio", "seconds")
    numbers = {key: value for key, value in record.items() if key.startswith(wanted) and math.isfinite(value)}
    return {"iteration": record["iteration"], **{key: float(f"{value:.4g}") for key, value in numbers.items()}}
