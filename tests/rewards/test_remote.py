"""Rewards by server: what the client makes of answers of every kind."""

import base64
import io
import json
from time import sleep

import numpy as np
import pytest
import torch

from g2rpo_core.foundation.errors import TransientError, UserError
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.remote import HttpClient
from g2rpo_core.rewards.reward_protocol import decode, encode
from g2rpo_core.rewards.spec import ServerSettings
from tests.conftest import ROOT
from tests.fixtures.chat_server import serve
from tests.fixtures.errors import refused
from tests.fixtures.images import IMAGES, SEEN

TWO = torch.rand(2, 3, 6, 5, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a red circle", "a blue cross"]
HEALTH = {
    "protocol": 1,
    "reward": "hps",
    "label": "HPS",
    "version": "7",
    "images": ["image/png", "application/x-npy"],
}
GOOD = (200, {}, b'{"scores": [0.5, 1]}')


def answering(*answers, health=HEALTH):
    """A score server that gives these answers in turn, and the last one from then on."""
    left = list(answers)

    def reply(request):
        if request.path == "/score":
            return left.pop(0) if len(left) > 1 else left[0]
        return health if isinstance(health, tuple) else (200, {}, json.dumps(health).encode())

    return serve(reply)


def reward_of(served, **server):
    """Quick where a server of a test fails: waits of milliseconds."""
    entry = {"server": {"url": served.url, "backoff": 0.001, "timeout": 30, "tries": 2, **server}}
    return registry.load(["hps"], ROOT / "nowhere", section={"hps": entry})["hps"]


def test_files_are_sent_as_rgb_and_on_white():
    for name, image in IMAGES.items():
        sent = decode(encode([image], "float32")[0])
        assert sent.mode == "RGB" and sent.tobytes() == SEEN[name].tobytes()


@pytest.mark.parametrize(
    "status, said, reasons, asked",
    [
        (200, b'{"scores": [NaN, 1]}', ["the score is no number: nan", None], 1),
        (200, b'{"scores": ["0.5", 1]}', ["the score is no number: '0.5'", None], 1),
        (200, b'{"scores": [null, 1]}', ["the score is no number: None", None], 1),
        (200, b'{"scores": [1, 2, 3]}', ["no answer: 3 scores and 2 reasons for 2 images"] * 2, 1),
        (200, b"<html>", ["no answer: Invalid JSON"] * 2, 1),
        (422, b'{"detail": "images: 0: not a PNG"}', ["no answer: status 422"] * 2, 1),
        (500, b'{"detail": "hps failed"}', ["hps failed"] * 2, 2),
    ],
)
def test_what_is_no_number_is_missing_and_of_no_answer_every_score(status, said, reasons, asked):
    with answering((status, {}, said)) as served:
        scores, why = reward_of(served).score_with_reasons(TWO, PROMPTS)
    assert scores.isnan().tolist() == [reason is not None for reason in reasons]
    assert all(reason in said if reason else said is None for reason, said in zip(reasons, why))
    assert len(served.requests) == 1 + asked


def test_a_busy_and_a_cut_off_server_are_asked_again_for_a_part_of_the_images_at_a_time():
    busy, one = (503, {"Retry-After": "0"}, b"busy"), (200, {}, b'{"scores": [0.5]}')
    with answering(busy, None, one, health=HEALTH | {"max_images": 1}) as served:
        scores = reward_of(served, tries=3, concurrency=1)(TWO, PROMPTS)
    assert scores.tolist() == [0.5, 0.5]
    assert [request.body["prompts"] for request in served.requests[-2:]] == [[p] for p in PROMPTS]


def test_an_answer_that_only_drips_ends_its_try():
    """Each byte within httpx's own timeout, the whole never."""
    dripping = (200, {}, iter(lambda: sleep(0.02) or b" ", None))
    with answering(dripping) as served:
        reasons = reward_of(served, timeout=0.2, tries=1).score_with_reasons(TWO, PROMPTS)[1]
    assert "no whole answer within 0.2 s" in reasons[0]


@pytest.mark.parametrize("status", [422, 401])
def test_the_key_is_in_nothing_that_a_failing_server_is_said_to_answer(status, monkeypatch):
    """401 ends the run, the others leave the scores missing."""
    monkeypatch.setenv("REWARD_KEY", "s3cret-of-ours")
    with answering((status, {}, b"Bearer s3cret-of-ours")) as served:
        reward = reward_of(served, key_variable="REWARD_KEY")
        if status == 401:
            with refused(r"hps.server: .* answers with status 401: 'Bearer \(the key of REWARD_"):
                reward(TWO, PROMPTS)
        else:
            said = reward.score_with_reasons(TWO, PROMPTS)[1][0]
            assert "Bearer (the key of REWARD_KEY)" in said and "s3cret" not in said


def test_a_key_that_leaves_the_machine_unencrypted_is_warned_of(monkeypatch, capsys):
    monkeypatch.setenv("REWARD_KEY", "k3y")
    for url, warned in (("http://gpu1:8700", True), ("https://gpu1", False), ("http://[::1]", 0)):
        HttpClient(ServerSettings(url=url, key_variable="REWARD_KEY"), "rewards.hps.server")
        said = capsys.readouterr().err
        assert ("key of REWARD_KEY is sent unencrypted" in said) == warned and "k3y" not in said
    monkeypatch.delenv("REWARD_KEY")
    with refused("rewards.hps.server.key_variable: REWARD_KEY is not set in the environment"):
        HttpClient(ServerSettings(url=url, key_variable="REWARD_KEY"), "rewards.hps.server")


@pytest.mark.parametrize(
    "url, told",
    [
        ("http://user:s3cret@gpu1:8700", "a name or password before @"),
        ("http://[::1", "is no address"),
    ],
)
def test_what_is_no_address_or_has_a_password_is_refused_with_the_settings(url, told):
    for name in ("hps", "unified_reward"):
        with pytest.raises(ValueError, match=told) as error:
            registry.settings_of({name: {"server": {"url": url}}}, name)
        assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    "health, server, message",
    [
        (HEALTH | {"reward": "pickscore"}, {}, "serves 'pickscore', not 'hps'"),
        (HEALTH, {"version": "8"}, "rewards.hps.server.version: .* serves version 7, not 8"),
        (HEALTH | {"images": ["image/png"]}, {}, "reads image/png only: set images: png"),
        ((200, {}, b"<html>"), {}, "is not a score server: Invalid JSON"),
        ((404, {}, b"nothing"), {}, "answers with status 404"),
    ],
)
def test_another_server_is_found_out_before_anything_is_scored(health, server, message):
    with answering(GOOD, health=health) as served, refused(message, UserError):
        reward_of(served, **server)
    assert [request.path for request in served.requests] == ["/health"]


def test_a_server_that_cannot_be_reached_may_be_there_later():
    with answering(GOOD) as served:
        pass
    with refused("hps.server: http.* did not say which reward .* ConnectError: ", TransientError):
        reward_of(served)


@pytest.mark.parametrize(
    "array, told",
    [(np.zeros((3, 4, 4)), "little-endian float32"), (np.array([{}], object), "allow_pickle")],
)
def test_an_array_that_is_no_image_is_refused(array, told):
    buffer = io.BytesIO()
    np.save(buffer, array)
    with pytest.raises(ValueError, match=told):
        decode("data:application/x-npy;base64," + base64.b64encode(buffer.getvalue()).decode())
