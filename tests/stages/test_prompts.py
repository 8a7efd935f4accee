"""Which prompts a profile trains and is judged on."""

import pytest

from g2rpo_core.data.choice import chosen_prompts
from g2rpo_core.data.settings import PromptSettings
from g2rpo_core.foundation.errors import UserError


@pytest.fixture(params=["shapes", "file"])
def settings(request, tmp_path) -> PromptSettings:
    (tmp_path / "mine.txt").write_text("\n".join(f"prompt {number}" for number in range(400)))
    test = "shapes" if request.param == "shapes" else str(tmp_path / "mine.txt")
    return PromptSettings(train="shapes", train_count=20, test=test, test_count=150, seed=3)


def test_prompts_that_choices_were_made_on_are_not_among_those_that_judge_them(settings):
    made_on = chosen_prompts(settings)
    judged_by = chosen_prompts(settings.model_copy(update={"test_skip": 150}))
    assert len(judged_by.test) == len(made_on.test) == 150 and judged_by.train == made_on.train
    assert not {prompt.text for prompt in judged_by.test} & {prompt.text for prompt in made_on.test}


def test_a_file_with_no_prompt_left_is_refused(tmp_path):
    (tmp_path / "few.txt").write_text("one\ntwo")
    settings = PromptSettings(
        train="shapes",
        train_count=2,
        test=str(tmp_path / "few.txt"),
        test_count=1,
        test_skip=2,
        seed=0,
    )
    with pytest.raises(UserError, match="test_skip: 2 leaves none of the 2 test prompts"):
        chosen_prompts(settings)
