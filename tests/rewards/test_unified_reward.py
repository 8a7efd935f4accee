"""UnifiedReward from a real server, the reading of answers, and missing scores."""

import numpy as np
import pytest
import torch

from g2rpo_core.data.prompts import Prompt
from g2rpo_core.rewards.registry import settings_of
from g2rpo_core.rewards.scoring import check_missing, score_table
from g2rpo_core.rewards.unified_reward import (
    TEMPLATES,
    parse,
    question,
    read_template,
    unified_reward,
)
from tests.fixtures.chat_server import completion, serve
from tests.fixtures.errors import refused

PROMPTS = [f"a red circle {number}" for number in range(6)]
IMAGES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def reward_of(served, template="final_score.v1", **server):
    """Quick where a server of a test fails: waits of milliseconds."""
    entry = {
        "template": template,
        "server": {"url": served.url, "model": "vlm", "backoff": 0.001, "timeout": 30, **server},
    }
    settings = settings_of({"unified_reward": entry}, "unified_reward")
    return unified_reward(None, torch.device("cpu"), settings)


def number_of(request) -> int:
    return int(request.question.rpartition("circle ")[2].rstrip("]"))


def good(request):
    return completion(f"circle (object): 1\nFinal Score: {1 + number_of(request) / 2}")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_question_holds_the_prompt_once_and_nothing_of_it_is_a_template(template):
    assert read_template(template).count("{prompt}") == 1
    assert question(template, "a {x} [y] {prompt}").endswith("Text Caption: [a {x} [y] {prompt}]")
    assert all(
        label.removesuffix(" (1-5):").rstrip(":") in read_template(template)
        for label in TEMPLATES[template]
    )


@pytest.mark.parametrize(
    "template, answer, expected",
    [
        ("final_score.v1", "red (color): 1\ncircle (object): 0\nFinal Score: 3.25", 3.25),
        (
            "axes.v1",
            "Alignment Score (1-5): 2.5\nCoherence Score (1-5): 3\nStyle Score (1-5): 4.25",
            3.25,
        ),
        (
            "word_axes.v1",
            (
                'Word-wise Scores: [["red", 0.1]]\n\nAlignment Score (1-5): 2\n'
                "Coherence Score (1-5): 3\nStyle Score (1-5): 4"
            ),
            3.0,
        ),
    ],
)
def test_answers_in_the_words_of_the_template_are_read(template, answer, expected):
    assert parse(template, answer) == expected


@pytest.mark.parametrize(
    "template, answer",
    [
        *(
            ("final_score.v1", answer)
            for answer in (
                "",
                "4",
                "Final Score: 0.9",
                "Final Score: 45",
                "Final Score: 4/5",
                "Final Score: ٤",
                "Final Score: 4\nFinal Score: 4",
            )
        ),
        ("axes.v1", "Alignment Score (1-5): 2\nCoherence Score (1-5): 3"),
    ],
)
def test_any_other_answer_is_no_score(template, answer):
    with pytest.raises(ValueError):
        parse(template, answer)


def test_every_image_gets_the_score_of_its_own_answer(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "s3cret")
    with serve(good) as served:
        scores = reward_of(served, key_variable="SERVER_KEY", concurrency=3)(IMAGES, PROMPTS)
    torch.testing.assert_close(scores, torch.tensor([1.0, 1.5, 2.0, 2.5, 3.0, 3.5]))
    assert scores.dtype == torch.float32 and len(served.requests) == 6
    for request in served.requests:
        sent = torch.from_numpy(np.asarray(request.image).copy()).permute(2, 0, 1)
        assert torch.equal(sent, (IMAGES[number_of(request)] * 255).round().byte())
        assert request.question == question("final_score.v1", PROMPTS[number_of(request)])
        assert (
            request.headers["Authorization"] == "Bearer s3cret" and request.body["temperature"] == 0
        )


@pytest.mark.parametrize(
    "reply, reason",
    [
        (completion("I like it, 4 of 5"), "I like it, 4 of 5"),
        (completion("circle (object): 1\nFinal", "length"), "cut at max_new_tokens 512"),
        ((200, {}, b'{"choices": []}'), "not a chat completion"),
        ((400, {}, b"image too large"), "status 400: 'image too large'"),
    ],
)
def test_a_bad_answer_is_missing_with_its_text_and_asked_for_once(reply, reason):
    with serve(lambda request: reply) as served:
        scores, reasons = reward_of(served).score_with_reasons(IMAGES[:1], PROMPTS[:1])
    assert scores.isnan().all() and reason in reasons[0] and len(served.requests) == 1


def test_results_keep_the_reason_and_a_run_stops_over_the_set_share():
    prompts = [
        Prompt(id=str(number), text=text, style="one") for number, text in enumerate(PROMPTS)
    ]
    with serve(
        lambda request: completion("no idea") if number_of(request) < 2 else good(request)
    ) as served:
        table = score_table({"unified_reward": reward_of(served)}, prompts, IMAGES)
    assert table.score.isna().tolist() == [True] * 2 + [False] * 4
    assert (
        table.reason.isna().tolist() == [False] * 2 + [True] * 4 and "'no idea'" in table.reason[0]
    )
    check_missing("unified_reward", 2, 40, 0.05)
    with refused("2 of 39 .* are missing, more than .*.max_missing = 0.05 allows; .* no idea"):
        check_missing("unified_reward", 2, 39, 0.05, "no idea")
