"""What the page asks and gets, without the page."""

import io
import json
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms.functional import to_tensor

from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile, profile_path
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.hub.settings import HubPrompts
from g2rpo_core.inference.demo import views
from g2rpo_core.inference.demo.answer import (
    ImageRequest,
    answer,
    checked,
    defaults,
    from_link,
    kept_links,
    link,
    list_rewards,
)
from g2rpo_core.inference.demo.page import make_page
from g2rpo_core.inference.painter import Painter
from g2rpo_core.rewards.addresses import names_of, on_loopback
from tests.conftest import ROOT
from tests.fixtures.commands import run_here
from tests.fixtures.errors import refused
from tests.fixtures.projects import small_project

RUNS = ["g2rpo-1", "g2rpo-2"]
PROMPT = "a large red circle above a small blue square"


@pytest.fixture(scope="module")
def usual():
    return defaults(load_profile(ROOT / "profiles" / "tiny.yaml"), RUNS)


def test_a_link_brings_back_whatever_was_asked(usual):
    for values in (
        {},
        {"prompt": 'a & b = "c"? #é</script>', "seed": 2**32 - 1, "runs": (), "rewards": ()},
        {"trained_share": 0.05},
    ):
        asked = checked({**usual, "prompt": PROMPT, **values})
        assert from_link(link(asked), usual) == asked


def test_a_link_may_leave_out_what_is_usual(usual):
    asked = from_link("?prompt=a+circle&seed=3&colour=red", usual)
    assert (asked.prompt, asked.seed, asked.steps, asked.runs) == ("a circle", 3, 10, ("g2rpo-1",))


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"prompt": " \n "}, "prompt: write what to draw"),
        ({"seed": "1.5"}, "seed: Input should be a valid integer"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"steps": 101}, "steps: Input should be less than or equal to 100"),
        ({"guidance": "nan"}, "guidance: Input should be"),
        ({"trained_share": 0}, "trained_share: Input should be greater than 0"),
    ],
)
def test_a_link_that_does_not_fit_is_refused_in_one_line(usual, values, complaint):
    with refused(complaint):
        from_link(urlencode({"prompt": PROMPT, **values}), usual)


def test_what_was_typed_is_escaped_wherever_it_is_shown(usual):
    evil = "<img src=x onerror=alert(1)> {{ 7*7 }}"
    asked = checked({**usual, "prompt": evil})
    for shown in (
        views.history([link(asked)], usual),
        views.message(evil),
        views.images(asked, [], {}, small(), None),
    ):
        assert "<img" not in shown and "49" not in shown
    assert "&lt;img src=x" in views.history(
        [link(asked), 3, "?steps=x"], usual
    )  # and what the browser kept of others is left out


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"runs": ["g2rpo-1"] * 2}, "runs: .*is there twice"),
        ({"rewards": ["hps"] * 2}, "rewards: .*is there twice"),
        ({"runs": [f"g2rpo-{number}" for number in range(65)]}, "runs: .* at most 64 items"),
        ({"runs": ["g2rpo-1"] * 10_000}, "it has too many fields"),
        ({"rewards": ["x" * 501]}, "rewards.*: .* at most 500 characters"),
        ({"colour": "x" * 2**16}, "it has over 65,536 characters"),
    ],
)
def test_a_link_names_each_run_once_and_few(usual, values, complaint):
    with refused(complaint):
        from_link(urlencode({"prompt": PROMPT, **values}, doseq=True), usual)


ANYTHING = [None, 1, True, "?prompt=a", {}, {"a": [1]}, [None], [["?"]], [{}, 3.5, "\ud800"]]


@pytest.mark.parametrize("saved", ANYTHING)
def test_a_browsers_history_may_be_anything(usual, saved):
    assert "prompt=" not in views.history(saved, usual)


def test_of_a_browsers_history_thirty_links_are_read(usual):
    links = [f"?prompt=a+{number}" for number in range(100)] + ["?prompt=" + "a" * 10**6]
    assert views.history(links, usual).count("<a ") == 30 == len(kept_links(links))


def small():
    return load_profile(ROOT / "profiles" / "tiny.yaml").evaluation


def test_the_pictures_of_the_committed_report_are_found():
    shown = views.pairs(ROOT / "reports" / "report.html")
    assert (
        shown.count("<table") == 3 and shown.count("data:image/png") > 30 and "<script" not in shown
    )
    assert "there is no report here" in views.pairs(None)


def test_who_lets_others_in_is_told_so():
    assert views.OPEN_TO_ALL in views.head(
        "tiny", open_to_all=True
    ) and views.OPEN_TO_ALL not in views.head("tiny", open_to_all=False)
    hosts = ("127.0.0.1", "127.0.0.2", "::1", "localhost", "0.0.0.0", "192.168.1.5", "::", "myhost")
    assert [on_loopback(host) for host in hosts] == [True] * 4 + [False] * 4
    assert all(
        {"localhost", "127.0.0.1", "[::1]"} < set(names_of(host))
        for host in ("myhost", "192.168.1.5", "fe80::1")
    )
    assert [names_of(host)[-1] for host in ("myhost", "fe80::1", "0.0.0.0", "::")] == [
        "myhost",
        "[fe80::1]",
        "*",
        "*",
    ]


@pytest.fixture(scope="module")
def project(models, tmp_path_factory):
    return small_project(tmp_path_factory.mktemp("demo"), models)


@pytest.fixture
def painter(project, monkeypatch):
    monkeypatch.chdir(project)
    return Painter(load_profile(profile_path("tiny")), project / "models" / "tiny")


def test_the_page_of_a_profile_with_prompts_from_the_hub_can_be_made(painter):
    prompts = painter.profile.prompts.model_copy(
        update={"test": HubPrompts(repo="someone/prompts", files=("test.txt",))}
    )
    painter.profile = painter.profile.model_copy(update={"prompts": prompts})
    page = make_page(painter, "tiny", lambda: RUNS, open_to_all=False)
    assert "what to draw" in json.dumps(page.get_config_file(), default=str)


def asked_for(usual, **values) -> ImageRequest:
    return checked({**usual, "prompt": PROMPT, "seed": 5, "steps": 3, **values})


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.pipeline
def test_each_picture_is_the_one_that_generate_draws_and_says_what_made_it(usual, painter, project):
    drawn = answer(painter, "tiny", RUNS, asked_for(usual, runs=RUNS, trained_share=0.67))
    assert [one.run for one in drawn] == ["base", *RUNS]
    for one in drawn:
        words = ["--seeds", "5", "--steps", "3", "--trained-share", "0.67", "--out", "out"]
        done = run_here(main, "generate", PROMPT, "--run", one.run, *words, folder=project)
        assert done.returncode == 0, done.stderr
        (file,) = done.stdout.split()
        assert np.array_equal(pixels(one.png), np.asarray(Image.open(project / file)))
        about, same = (
            json.loads(Image.open(source).text["g2rpo"])
            for source in (io.BytesIO(one.png), project / file)
        )
        assert about.items() <= same.items() and about["run"] == one.run
    assert not np.array_equal(pixels(drawn[0].png), pixels(drawn[1].png))


@pytest.mark.pipeline
def test_scores_are_those_of_the_rewards_and_a_reason_where_there_is_none(usual, painter):
    (drawn,) = answer(
        painter, "tiny", RUNS, asked_for(usual, runs=(), rewards=("hps", "clip_score", "verifier"))
    )
    image = to_tensor(Image.open(io.BytesIO(drawn.png)))[None]
    hps = painter.load_rewards(["hps"])["hps"](image, [PROMPT])
    assert drawn.scores["hps"] == pytest.approx(float(hps), abs=1e-3)  # the file has 8 bits
    assert 0 <= drawn.scores["verifier"] <= 1
    (other,) = answer(
        painter, "tiny", RUNS, asked_for(usual, prompt="a cat", runs=(), rewards=("verifier",))
    )
    assert other.scores == {"verifier": "only knows captions of tiny tasks"}


@pytest.mark.pipeline
def test_a_lora_at_scale_zero_is_the_base_and_comes_back(usual, painter):
    draw = lambda **values: [
        pixels(one.png)
        for one in answer(painter, "tiny", RUNS, asked_for(usual, runs=("g2rpo-2",), **values))
    ]
    base, full = draw()
    assert not np.array_equal(base, full)
    assert np.array_equal(*draw(lora_scale=0.0))
    half = draw(lora_scale=0.5)[1]
    assert not np.array_equal(half, base) and not np.array_equal(half, full)
    mixed = draw(trained_share=0.34)[1]
    assert not np.array_equal(mixed, full)
    assert np.array_equal(draw()[1], full)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"prompt": "a circle " * 20}, "are over the profile's embed.max_sequence_length = 12"),
        ({"runs": ("../../etc",)}, "there is no run '../../etc' here, only g2rpo-1, g2rpo-2"),
        (
            {"rewards": ("nonsense",)},
            "there is no reward 'nonsense' here, only hps, clip_score, pickscore",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_sentence(usual, painter, values, complaint):
    with pytest.raises(UserError, match=complaint.replace(".", r"\.")):
        answer(painter, "tiny", RUNS, asked_for(usual, **values))
    assert list_rewards(painter.profile)[-1] == "verifier"
