"""`g2rpo serve-reward` as a process: equal to local scores, refusing, stopping."""

import json
import re
import runpy
import signal
import sys

import httpx
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from g2rpo_core.cli.main import main
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.reward_protocol import Health, encode
from g2rpo_core.rewards.scoring import score_all
from tests.conftest import ROOT
from tests.fixtures.commands import refusal
from tests.fixtures.images import PROMPTS
from tests.fixtures.score_server import serving
from tests.fixtures.waiting import HUNG

pytestmark = pytest.mark.pipeline

TENSORS = torch.rand(8, 3, 40, 40, generator=torch.Generator().manual_seed(0))
CUSTOM = '''
class Mine:
    """Mean of red, but for prompts that ask for trouble."""

    def score(self, images, prompts):
        if "raise" in prompts:
            raise RuntimeError("no memory left\\non this device")
        reds = images[:, 0].mean((1, 2))
        reds[[prompt == "nan" for prompt in prompts]] = float("nan")
        return reds
'''
JSON = {"Content-Type": "application/json"}
PIXEL = encode([Image.new("RGB", (1, 1))], "png")[0]
LARGE = Image.new("L", (500, 400))  # with 1 MiB of body there are 2**18 pixels


def section_of(server, name="hps", **settings) -> dict:
    how = {"url": server.url, "backoff": 0.01, "tries": 2, "timeout": 60, **settings}
    return {name: {"server": how}}


def post(server, headers=JSON, **body) -> httpx.Response:
    """The answer to POST /score."""
    return httpx.post(f"{server.url}/score", headers=headers, **body, trust_env=False, timeout=HUNG)


def asking(prompts: list, images: list) -> bytes:
    return json.dumps({"prompts": prompts, "images": images}).encode()


@pytest.fixture(scope="module")
def hps(models, tmp_path_factory):
    words = ["--reward", "hps_v2_1", "--models", models, "--max-request-mib", 1]
    with serving(*words, folder=tmp_path_factory.mktemp("hps")) as server:
        yield server


@pytest.mark.parametrize("form", ["float32", "png"])
def test_scores_of_tensors_are_the_local_ones(hps, models, form):
    here = registry.load(["hps"], models)
    sent = TENSORS if form == "float32" else (TENSORS * 255).round() / 255
    section = section_of(hps, max_images_per_request=3, images=form)
    served = score_all(registry.load(["hps"], models, section=section), TENSORS, PROMPTS)
    local = score_all(here, sent, PROMPTS).values
    torch.testing.assert_close(served.values, local, rtol=0, atol=1e-6)
    assert served.reasons == [[None] * 8] and local.std() > 1e-3


def test_health_names_reward_label_version_and_that_the_models_are_tiny(hps):
    health = httpx.get(f"{hps.url}/health", trust_env=False).json()
    said = {"reward": "hps", "label": "HPS-v2.1", "note": "tiny models, not HPS-v2.1"}
    assert said.items() <= health.items() and health["version"] in hps.first_line


@pytest.mark.parametrize(
    "body, status, reason, headers",
    [
        (b'{"prompts": ["a"]}', 422, "images: Field required", {}),
        (asking(["a", "b"], [PIXEL]), 422, "1 images and 2 prompts", {}),
        (asking(["a", "b"], [PIXEL, PIXEL[:40]]), 422, "images: 1: cannot be read: ", {}),
        (asking(["a"], [encode([LARGE], "png")[0][:-40]]), 422, "truncated", {}),
        (asking(["a", "b"], encode([LARGE] * 2, "png")), 422, "images: too many pixels", {}),
        ((b"x" * 2**16 for _ in range(17)), 413, "over 1 MiB", {}),  # without a length
        # From a page of another site: a browser sends only other types unasked, and by DNS
        # rebinding another name
        (asking(["a"], [PIXEL]), 422, "", {"Content-Type": "text/plain"}),
        (asking(["a"], [PIXEL]), 400, "", {"Host": "evil.example"}),
    ],
)
def test_a_request_that_is_none_gets_a_reason_and_the_next_one_scores(
    hps, body, status, reason, headers
):
    response = post(hps, JSON | headers, content=body)
    assert response.status_code == status and reason in response.text
    assert r"\n" not in response.text
    good = post(hps, content=asking(["a"], [PIXEL]))
    assert good.status_code == 200 and isinstance(good.json()["scores"][0], float)
    assert good.json()["reasons"] == [None] and "Traceback" not in hps.log.read_text()


@pytest.fixture
def profile(tmp_path):
    """A profile for the server, which has the class, and for those who ask it."""
    (tmp_path / "mine.py").write_text(CUSTOM)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "tiny.yaml").symlink_to(ROOT / "profiles" / "tiny.yaml")
    entry = '{class: "mine:Mine", label: Redness, server: {url: "http://localhost:1"}}'
    (tmp_path / "profiles" / "own.yaml").write_text(f"extends: tiny\nrewards: {{mine: {entry}}}\n")
    return tmp_path


def test_a_class_of_the_users_own_fails_as_answers_and_the_server_goes_on(profile, monkeypatch):
    monkeypatch.setenv("SCORE_KEY", "s3cret")
    words = ["--reward", "mine", "--profile", "own", "--key-variable", "SCORE_KEY"]
    with serving(*words, folder=profile, SCORE_KEY="s3cret") as server:
        section = section_of(server, "mine", key_variable="SCORE_KEY")
        reward = registry.load(["mine"], profile, section=section)["mine"]
        ask = lambda *prompts: reward.score_with_reasons(TENSORS[:2], prompts)
        torch.testing.assert_close(ask("a", "b")[0], TENSORS[:2, 0].mean((1, 2)), rtol=0, atol=1e-7)
        scores, reasons = ask("a", "nan")
        assert scores.isnan().tolist() == [False, True]
        assert reasons == [None, "the server: the reward is nan"]
        scores, reasons = ask("raise", "b")
        assert scores.isnan().all() and "\n" not in reasons[0]
        assert "mine failed: " in reasons[1] and "RuntimeError: no memory left on" in reasons[1]
        assert ask("a", "b")[0].isfinite().all()
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 401
        assert post(server, {"Authorization": "Bearer other"}, content=b"{}").status_code == 401
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=HUNG) == 0
        assert server.process.stdout.read() == "stopped\n"
    assert server.log.read_text().count("RuntimeError: no memory left\n") == 2  # of two tries


@pytest.mark.parametrize(
    "words, message",
    [
        (["--reward", "beauty", "--profile", "own"], "--reward beauty: unknown; there are hps, "),
        (["--reward", "hps", "--key-variable", "NOT_SET"], "NOT_SET: is not set in the env"),
    ],
)
def test_words_that_do_not_fit_end_in_one_line_before_a_model_is_loaded(
    profile, monkeypatch, words, message
):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command puts its folder there
    told = refusal(main, "serve-reward", *words, "--port", 0, folder=profile)
    assert told.startswith("error: ") and message in told


def test_the_server_of_the_documentation_answers(tmp_path):
    text = (ROOT / "docs" / "reward_servers.md").read_text()
    (tmp_path / "server.py").write_text(re.search(r"(?s)```python\n(.*?)```", text)[1])
    with TestClient(runpy.run_path(str(tmp_path / "server.py"))["app"]) as client:
        assert Health.model_validate(client.get("/health").json()).reward == "brightness"
        sent = {"prompts": ["a"], "images": encode([Image.new("RGB", (4, 4), "#808080")], "png")}
        assert client.post("/score", json=sent).json() == {"scores": [pytest.approx(128 / 255)]}
