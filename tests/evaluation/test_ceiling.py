"""What a task's own pictures score."""

import pytest

from g2rpo_core.data.prompts import Prompt
from g2rpo_core.evaluation.ceiling import score_own_pictures
from g2rpo_core.evaluation.results import measure_saturation
from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.tasks.table import TASKS, verify

REWARDS = {"verifier": verify, "saturation": measure_saturation}


def prompts_of(task: str) -> list[Prompt]:
    scenes = TASKS[task].distinct_scenes(10, 0, testing=True)
    return [Prompt(str(number), scene.caption, scene.style) for number, scene in enumerate(scenes)]


def settings_of(size: int, batch: int = 4) -> EvaluationSettings:
    shape = {"height": size, "width": size}
    return EvaluationSettings(**shape, steps=(1,), rewards=tuple(REWARDS), seed=3, batch=batch)


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_own_pictures_are_right_however_they_are_batched(task):
    size = TASKS[task].size
    found = score_own_pictures(prompts_of(task), REWARDS, settings_of(size))
    assert found["verifier"] == 1.0 and 0 < found["saturation"] < 1
    alone = score_own_pictures(prompts_of(task), REWARDS, settings_of(size, batch=1))
    assert alone == pytest.approx(found)
