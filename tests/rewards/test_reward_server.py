"""`g2rpo serve-reward` as a process: equal to local scores, refusing, stopping, killed."""

import base64
import io
import json
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from threading import Timer

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from g2rpo_core.cli.main import main
from g2rpo_core.foundation.errors import TransientError
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.reward_protocol import encode
from g2rpo_core.rewards.scoring import check_missing, score_all
from g2rpo_core.tasks.table import TASKS
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.images import IMAGES, PROMPTS, folder_to_score
from tests.fixtures.score_server import serving
from tests.fixtures.waiting import HUNG, until

pytestmark = pytest.mark.pipeline

TENSORS = torch.rand(8, 3, 40, 40, generator=torch.Generator().manual_seed(0))
CUSTOM = '''
import time
from pathlib import Path

class Mine:
    """Mean of red, but for prompts that ask for trouble."""

    def score(self, images, prompts):
        if "raise" in prompts:
            raise RuntimeError("no memory left\\non this device")
        if "sleep" in prompts and not Path("slept").exists():
            Path("slept").touch()
            time.sleep(4)
        if "forever" in prompts:
            Path("sleeping").touch()
            time.sleep(600)
        reds = images[:, 0].mean((1, 2))
        reds[[prompt == "nan" for prompt in prompts]] = float("nan")
        return reds
'''


def section_of(server, name="hps", **settings) -> dict:
    return {
        name: {
            "server": {"url": server.url, "backoff": 0.01, "tries": 2, "timeout": 60, **settings}
        }
    }


@pytest.fixture(scope="module")
def hps(models, tmp_path_factory):
    words = ["--reward", "hps_v2_1", "--models", models, "--max-request-mib", 1]
    with serving(*words, folder=tmp_path_factory.mktemp("hps")) as server:
        yield server


def test_scores_of_tensors_are_the_local_ones(hps, models):
    local = score_all(registry.load(["hps"], models), TENSORS, PROMPTS).values
    for images_per_request in (8, 3):
        section = section_of(hps, max_images_per_request=images_per_request)
        served = score_all(registry.load(["hps"], models, section=section), TENSORS, PROMPTS)
        torch.testing.assert_close(served.values, local, rtol=0, atol=1e-6)
        assert served.reasons == [[None] * 8]
    assert local.std() > 1e-3


def test_as_png_tensors_score_as_their_files_do(hps, models):
    section = section_of(hps, images="png")
    served = score_all(registry.load(["hps"], models, section=section), TENSORS, PROMPTS).values
    rounded = score_all(
        registry.load(["hps"], models), (TENSORS * 255).round() / 255, PROMPTS
    ).values
    exact = score_all(registry.load(["hps"], models), TENSORS, PROMPTS).values
    torch.testing.assert_close(served, rounded, rtol=0, atol=1e-6)
    assert 1e-7 < (served - exact).abs().max() < 0.01  # what 8 bits lose


def test_health_names_reward_label_version_and_that_the_models_are_tiny(hps):
    health = httpx.get(f"{hps.url}/health", trust_env=False).json()
    assert (
        health["reward"] == "hps"
        and health["label"] == "HPS-v2.1"
        and health["note"] == "tiny models, not HPS-v2.1"
    )
    assert health["version"].startswith(f"{version('g2rpo')}+") and health["protocol"] == 1
    assert (
        hps.url.startswith("http://127.0.0.1:")
        and health["version"] in hps.first_line
        and "note:" not in hps.log.read_text()
    )


JSON = {"Content-Type": "application/json"}


def post(server, headers=JSON, **body) -> httpx.Response:
    """The answer to POST /score."""
    return httpx.post(f"{server.url}/score", headers=headers, **body, trust_env=False, timeout=HUNG)


PIXEL = encode([Image.new("RGB", (1, 1))], "png")[0]


@pytest.mark.parametrize(
    "body, status, reason",
    [
        (b"", 422, "Invalid JSON"),
        (b"[]", 422, "object"),
        (b'{"prompts": ["a"]}', 422, "images: Field required"),
        (
            json.dumps({"prompts": ["a"], "images": [PIXEL], "more": 1}).encode(),
            422,
            "more: Extra inputs",
        ),
        (
            json.dumps({"prompts": [1], "images": [PIXEL]}).encode(),
            422,
            "prompts: 0: Input should be a valid string",
        ),
        (
            json.dumps({"prompts": ["a", "b"], "images": [PIXEL]}).encode(),
            422,
            "1 images and 2 prompts",
        ),
        (
            json.dumps({"prompts": ["a"] * 257, "images": [PIXEL] * 257}).encode(),
            413,
            "257 images; a request may have at most 256",
        ),
        (
            json.dumps({"prompts": ["a", "b"], "images": [PIXEL, PIXEL[:40]]}).encode(),
            422,
            "images: 1: not",
        ),
        (
            json.dumps({"prompts": ["x" * 4001], "images": [PIXEL]}).encode(),
            422,
            "prompts: 0: 4001 characters",
        ),
        (b"x" * (2**20 + 1), 413, "the request is over 1 MiB"),
        ((b"x" * 2**16 for _ in range(17)), 413, "the request is over 1 MiB"),  # without a length
    ],
)
def test_a_request_that_is_none_gets_a_reason_and_the_next_one_scores(hps, body, status, reason):
    response = post(hps, content=body)
    assert (
        response.status_code == status
        and reason in response.json()["detail"]
        and "\n" not in response.json()["detail"]
    )
    good = post(hps, json={"prompts": ["a"], "images": [PIXEL]})
    assert (
        good.status_code == 200
        and isinstance(good.json()["scores"][0], float)
        and good.json()["reasons"] == [None]
    )
    assert "Traceback" not in hps.log.read_text()


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Host": "evil.example"}, 400),
        ({"Host": "localhost:1"}, 200),
    ],
)
def test_a_page_of_another_site_gets_no_scores(hps, headers, status):
    """A browser sends only other types unasked, and by DNS rebinding another name."""
    body = json.dumps({"prompts": ["a"], "images": [PIXEL]})
    assert post(hps, JSON | headers, content=body).status_code == status
    # Nobody needs it, and it would need the key
    assert httpx.get(f"{hps.url}/openapi.json", trust_env=False).status_code == 404


@pytest.mark.parametrize("sent, refused", [(0, 0), (2**20 - 1000, 4)])
def test_uploads_that_do_not_end_keep_nobody_waiting(hps, sent, refused):
    """Twelve, with memory for eight: the others are told so."""
    head = (
        "POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {2**20}\r\n\r\n"
    )
    good = lambda: post(hps, json={"prompts": ["a"], "images": [PIXEL]})
    with ExitStack() as open_:
        slow = [
            open_.enter_context(
                socket.create_connection(("127.0.0.1", int(hps.url.rpartition(":")[2])))
            )
            for _ in range(12)
        ]
        for one in slow:
            one.sendall(head.encode() + b" " * sent)
        answered = lambda: select.select(slow, [], [], 0)[0]  # whichever came too late
        until(lambda: len(answered()) == refused, 50)
        assert {one.recv(12) for one in answered()} <= {b"HTTP/1.1 503"}
        assert refused or good().status_code == 200
    until(lambda: good().status_code == 200, 30)  # their room is free again


def test_a_connection_that_a_client_keeps_is_not_closed_under_it(hps):
    with httpx.Client(trust_env=False, limits=httpx.Limits(keepalive_expiry=None)) as client:
        sockets = []
        for wait in (6, 0):  # clients keep a quiet connection for 5 s
            with client.stream("GET", f"{hps.url}/health") as response:
                sockets.append(response.extensions["network_stream"].get_extra_info("client_addr"))
                assert response.read()
            time.sleep(wait)
    assert sockets[0] == sockets[1]


@pytest.mark.parametrize(
    "sides, reason",
    [
        ([(30_000, 5_000)], "images: 0: 150000000 pixels; the images of a request may have 262144"),
        ([(500, 400)] * 2, "images: 1: 200000 pixels; the images of a request may have 62144 in"),
        ([(8, 8), (1, 200_000)], "images: 1: has 1 x 200000 pixels, one side over 100 times"),
        ([(101, 1)], "images: 0: has 101 x 1 pixels, one side over 100 times the other: crop it"),
    ],
)
def test_an_image_that_would_fill_the_memory_is_refused(hps, sides, reason):
    """Of few bytes each; with 1 MiB of body there are 2**18 pixels."""
    bombs = encode([Image.new("1", side) for side in sides], "png")
    response = post(hps, json={"prompts": ["a"] * len(bombs), "images": bombs})
    assert response.status_code == 422 and reason in response.json()["detail"]


def test_g2rpo_score_asks_the_server(hps, models, tmp_path):
    folder_to_score(tmp_path)
    mine = f'{{server: {{url: "{hps.url}", reward: hps}}, label: At the server}}'
    (tmp_path / "profiles" / "served.yaml").write_text(
        f"extends: tiny\nrewards: {{theirs: {mine}}}\n"
    )
    words = ["--prompts", "prompts.txt", "images"]
    done = run_here(
        main, "score", "--reward", "theirs", "--profile", "served", *words, folder=tmp_path
    )
    assert (
        done.returncode == 0
        and "theirs" in done.stdout
        and "tiny models, not HPS-v2.1" in done.stdout
    ), done.stderr
    table = pd.read_csv(tmp_path / "scores.csv")
    expected = registry.load(["hps"], models)["hps"](
        [IMAGES[name] for name in sorted(IMAGES)], PROMPTS
    )
    assert (
        table.theirs.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        and table.theirs_reason.isna().all()
    )


@pytest.fixture
def profile(tmp_path):
    """A profile for the server, which has the class, and for those who ask it."""
    (tmp_path / "mine.py").write_text(CUSTOM)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "tiny.yaml").symlink_to(ROOT / "profiles" / "tiny.yaml")
    entry = '{class: "mine:Mine", label: Redness, server: {url: "http://localhost:1"}}'
    (tmp_path / "profiles" / "own.yaml").write_text(f"extends: tiny\nrewards: {{mine: {entry}}}\n")
    return tmp_path


def test_a_class_of_the_users_own_fails_as_answers_and_the_server_goes_on(profile):
    with serving(
        "--reward",
        "mine",
        "--profile",
        "own",
        "--key-variable",
        "SCORE_KEY",
        folder=profile,
        SCORE_KEY="s3cret",
    ) as server:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SCORE_KEY", "s3cret")
            ask = lambda prompts, **how: registry.load(
                ["mine"],
                profile,
                section=section_of(server, "mine", key_variable="SCORE_KEY", **how),
            )["mine"].score_with_reasons(TENSORS[: len(prompts)], prompts)
            scores, _ = ask(["a", "b"])
            torch.testing.assert_close(scores, TENSORS[:2, 0].mean((1, 2)), rtol=0, atol=1e-7)
            scores, reasons = ask(["a", "nan"])
            assert scores.isnan().tolist() == [False, True] and reasons == [
                None,
                "the server: the reward is nan",
            ]
            scores, reasons = ask(["raise", "b"])
            assert (
                scores.isnan().all()
                and "mine failed: " in reasons[1]
                and "RuntimeError: no memory left on this device" in reasons[1]
            )
            assert "(2 tries)" in reasons[0] and "Traceback" not in reasons[0]
            scores, reasons = ask(["sleep"], timeout=2, tries=5)  # the first answer is too slow
            assert scores.isfinite().all() and (profile / "slept").exists()
        refused = httpx.get(f"{server.url}/health", trust_env=False)
        assert refused.status_code == 401 and "a key is needed" in refused.json()["detail"]
        server.process.send_signal(signal.SIGTERM)
        assert (
            server.process.wait(timeout=HUNG) == 0 and server.process.stdout.read() == "stopped\n"
        )
    assert (
        "Traceback" not in server.log.read_text()
    )  # the answer names the line of the class that failed


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_missing_scores_and_words(profile):
    with serving("--reward", "mine", "--profile", "own", folder=profile) as server:
        reward = registry.load(
            ["mine"], profile, section=section_of(server, "mine", max_images_per_request=1)
        )["mine"]
        assert reward(TENSORS, PROMPTS).isfinite().all()

        def kill():
            while not (profile / "sleeping").exists():
                if server.process.poll() is not None:
                    return
            server.process.kill()

        Timer(0, kill).start()
        scores, reasons = reward.score_with_reasons(TENSORS, ["a"] * 4 + ["forever"] + ["b"] * 3)
        server.process.wait()
        lost = [why for why in reasons if why]
        assert scores[4].isnan() and all(
            why.startswith("no answer: ") and why.endswith("(2 tries)") for why in lost
        )
        assert [why is None for why in reasons] == scores.isfinite().tolist()
        with pytest.raises(
            Exception,
            match="reward mine: .* scores are missing, more than rewards.mine.max_missing",
        ):
            check_missing("mine", len(lost), 8, 0.05, lost[0])
        with pytest.raises(
            TransientError,
            match="rewards.mine.server: http://127.0.0.1:.* did not say which reward",
        ):
            registry.load(["mine"], profile, section=section_of(server, "mine"))


@pytest.mark.slow
def test_it_stops_at_ctrl_c_without_a_traceback_and_says_when_it_is_open_to_all(models, tmp_path):
    with serving(
        "--reward", "verifier", "--models", models, "--host", "0.0.0.0", folder=tmp_path
    ) as server:
        assert (
            "note: 0.0.0.0 can be reached from outside; no key is needed" in server.log.read_text()
        )
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        section = {"verifier": {"server": {"url": url}}}
        rng = np.random.default_rng(0)
        task = TASKS["shapes"]
        scenes = [task.random_scene(rng) for _ in range(8)]
        drawn = torch.from_numpy(np.stack([task.draw(scene, rng) for scene in scenes])).float()
        captions = [
            scene.caption for scene in scenes[:4] + scenes[:4]
        ]  # half of them another image's
        local = registry.load(["verifier"], models)["verifier"](drawn, captions)
        served = registry.load(["verifier"], models, section=section)["verifier"](drawn, captions)
        torch.testing.assert_close(served, local, rtol=0, atol=0)
        assert local.std() > 0.1
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=HUNG) == 0 and "Traceback" not in server.log.read_text()


def test_words_that_do_not_fit_end_in_one_line_before_a_model_is_loaded(
    profile, models, monkeypatch
):
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command puts its folder there
    (profile / "profiles" / "only.yaml").write_text(
        'extends: tiny\nrewards: {far: {server: {url: "http://localhost:1"}}}\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, message in (
            (
                ["--reward", "beauty", "--models", models, "--port", 0],
                "--reward beauty: unknown; there are hps, ",
            ),
            (
                ["--reward", "far", "--profile", "only", "--port", 0],
                "--reward far: the profile only gets it from a server",
            ),
            (
                ["--reward", "hps", "--models", models, "--port", port],
                f"--port {port}: cannot listen there: Address already in use",
            ),
            (
                ["--reward", "hps", "--models", models, "--host", "nowhere.invalid"],
                "--host nowhere.invalid",
            ),
            (
                ["--reward", "hps", "--models", models, "--port", 0, "--key-variable", "NOT_SET"],
                "NOT_SET: is not set in the env",
            ),
            (["--reward", "hps", "--models", "models/none", "--port", 0], "dvc repro models"),
            (
                ["--reward", "hps", "--models", models, "--port", 0, "--device", "cuda:99"],
                "--device cuda:99: torch finds ",
            ),
            (
                ["--reward", "hps", "--models", models, "--port", 0, "--device", "tpu9"],
                "--device tpu9: ",
            ),
        ):
            told = refusal(main, "serve-reward", *words, folder=profile)
            assert told.startswith("error: ") and message in told


def test_what_it_says_of_an_image_is_the_data_it_was_sent(hps):
    """A .npy as any other program may write it: docs/reward_servers.md."""
    buffer = io.BytesIO()
    np.save(buffer, TENSORS[0].numpy())
    url = "data:application/x-npy;base64," + base64.b64encode(buffer.getvalue()).decode()
    asked = {"prompts": [PROMPTS[0]] * 2, "images": [url, url]}
    scores = post(hps, json=asked).json()["scores"]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def test_the_server_of_the_documentation_answers(tmp_path):
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "reward_servers.md").read_text(), re.DOTALL
    )
    (tmp_path / "my_server.py").write_text(code)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = ["my_server:app", "--fd", str(listener.fileno()), "--log-level", "warning"]
        command = [sys.executable, "-m", "uvicorn", *words]
        process = subprocess.Popen(command, cwd=tmp_path, pass_fds=[listener.fileno()])
        try:
            entry = {
                "server": {"url": f"http://127.0.0.1:{listener.getsockname()[1]}", "images": "png"}
            }
            reward = registry.load(["brightness"], tmp_path, section={"brightness": entry})[
                "brightness"
            ]
            scores, reasons = reward.score_with_reasons(TENSORS, PROMPTS)
        finally:
            process.terminate()
            process.wait(timeout=HUNG)
    luminance = torch.tensor([0.299, 0.587, 0.114])[:, None, None]  # of PIL's "L"
    torch.testing.assert_close(
        scores, (TENSORS * luminance).sum(1).mean((1, 2)), rtol=0, atol=0.005
    )
    assert reasons == [None] * 8
