"""Rewards by server: what the client makes of answers of every kind."""

import base64
import io
import json
import math
import threading

import numpy as np
import pytest
import torch

from g2rpo_core.foundation.errors import TransientError, UserError
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.remote import MOST_BYTES, HttpClient
from g2rpo_core.rewards.reward_protocol import answer, decode, encode
from g2rpo_core.rewards.scoring import score_all
from g2rpo_core.rewards.spec import ServerSettings
from tests.conftest import ROOT
from tests.fixtures.errors import refused
from tests.fixtures.images import IMAGES, SEEN, photograph
from tests.fixtures.score_server import HEALTH, answering

IMAGES_8 = torch.rand(8, 3, 6, 5, generator=torch.Generator().manual_seed(0))
PROMPTS = [f"prompt {number}" for number in range(8)]


def reward_of(served, name="hps", **server):
    """Quick where a server of a test fails: waits of milliseconds."""
    entry = {"server": {"url": served.url, "backoff": 0.001, "timeout": 30, "tries": 2, **server}}
    return registry.load([name], ROOT / "nowhere", section={name: entry})[name]


def good(body, number):
    """Each image's score is the number in its prompt."""
    scores = [float(prompt.split()[1]) for prompt in body["prompts"]]
    return 200, json.dumps({"scores": scores}).encode()


@pytest.mark.parametrize("form, media", [("float32", "application/x-npy"), ("png", "image/png")])
def test_every_image_gets_its_own_score_and_arrives_as_it_was(form, media):
    known = HEALTH | {"reward": "v2", "max_images": 3}
    with answering(good, known) as served:
        reward = reward_of(served, "mine", reward="v2", version="7", images=form)
        scores, reasons = reward.score_with_reasons(IMAGES_8, PROMPTS)
    assert torch.equal(scores, torch.arange(8.0)) and reasons == [None] * 8
    assert sorted(len(body["images"]) for body in served.bodies) == [2, 3, 3]
    for body in served.bodies:
        for prompt, url in zip(body["prompts"], body["images"]):
            sent, original = decode(url), IMAGES_8[PROMPTS.index(prompt)]
            assert url.startswith(f"data:{media};base64,")
            if form == "float32":
                assert torch.equal(sent, original)
            else:
                rounded = (original * 255).round().byte().permute(1, 2, 0)
                assert np.array_equal(np.asarray(sent), rounded.numpy())


def test_files_are_sent_as_they_are_with_their_palette_and_on_white():
    for image in (*SEEN.values(), IMAGES["transparent"], photograph(9, 7).convert("CMYK")):
        sent = decode(encode([image], "float32")[0])
        seen = SEEN["transparent"] if image is IMAGES["transparent"] else image
        assert sent.mode == {"CMYK": "RGB"}.get(image.mode, seen.mode)
        assert sent.convert("RGB").tobytes() == seen.convert("RGB").tobytes()


@pytest.mark.parametrize(
    "score, reason",
    [
        ("NaN", "the score is nan"),
        ('"0.5"', "not a number: '0.5'"),
        ("null", "the server gave neither a score nor a reason"),
    ],
)
def test_what_is_no_number_is_missing_and_the_others_stand(score, reason):
    with answering(lambda body, number: (200, b'{"scores": [%s, 1]}' % score.encode())) as served:
        scores, reasons = score_all({"hps": reward_of(served)}, IMAGES_8[:2], PROMPTS[:2])
    assert scores[0].isnan().tolist() == [True, False] and scores[0, 1] == 1
    assert reason in reasons[0][0] and reasons[0][1] is None


@pytest.mark.parametrize(
    "status, said, reason, asked",
    [
        (200, b'{"scores": [1, 2, 3]}', "not scores: 3 scores and 2 reasons for 2 images", 1),
        (200, b"<html>", "not an answer with scores: '<html>'", 1),
        (422, b'{"detail": "images: 0: not a PNG"}', "no answer: status 422", 1),
        (500, b'{"detail": "hps failed"}', "hps failed\"}' (2 tries)", 2),
        (200, bytes(MOST_BYTES + 1), "no answer: an answer of over 64 MiB", 1),
    ],
)
def test_an_answer_that_is_none_leaves_every_score_of_its_request_missing(
    status, said, reason, asked
):
    with answering(lambda body, number: status and (status, said)) as served:
        scores, reasons = reward_of(served).score_with_reasons(IMAGES_8[:2], PROMPTS[:2])
    assert scores.isnan().all() and all(reason in why for why in reasons)
    assert len(served.bodies) == asked


def test_a_busy_and_a_silent_server_are_asked_again():
    over = threading.Event()

    def slow(body, number):
        if number == 1:
            over.wait(60)
        return good(body, number) if number else (503, b"busy")

    try:
        with answering(slow) as served:
            scores = reward_of(served, timeout=1, tries=5)(IMAGES_8[:2], PROMPTS[:2])
            over.set()
    finally:
        over.set()
    assert scores.tolist() == [0, 1] and len(served.bodies) >= 3


@pytest.mark.parametrize("status", [200, 401])
def test_the_key_is_in_nothing_that_a_failing_server_is_said_to_answer(status, monkeypatch):
    """401 ends the run, the others leave the scores missing."""
    monkeypatch.setenv("REWARD_KEY", "s3cret-of-ours")
    with answering(lambda body, number: (status, b"Bearer s3cret-of-ours")) as served:
        reward = reward_of(served, key_variable="REWARD_KEY")
        try:
            said = reward.score_with_reasons(IMAGES_8[:1], PROMPTS[:1])[1][0]
        except UserError as error:
            said = str(error)
    assert "Bearer (the key of REWARD_KEY)" in said and "s3cret" not in said and "\n" not in said
    assert ("rewards.hps.server: " in said and "answers with status 401" in said) == (status == 401)


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
        ("http://user:s3cret@gpu1:8700", "holds a name or password"),
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
        (HEALTH | {"reward": "pickscore"}, {}, r"serves 'pickscore' \(HPS\), not 'hps'"),
        (HEALTH, {"version": "8"}, "rewards.hps.server.version: .* serves version 7, not 8"),
        (HEALTH | {"images": ["image/png"]}, {}, "reads image/png only: set images: png"),
        ((200, b"<html>"), {}, "is not a score server: Invalid JSON"),
        ((404, b"nothing"), {}, "answers with status 404"),
    ],
)
def test_another_server_is_found_out_before_anything_is_scored(health, server, message):
    with answering(good, health) as served, refused(message, UserError):
        reward_of(served, **server)
    assert served.bodies == []


def test_a_server_that_cannot_be_reached_may_be_there_later():
    with answering(good) as served:
        pass
    gone = r"rewards.hps.server: http.* did not say which reward .* ConnectError: .* \(2 tries\)"
    with refused(gone, TransientError):
        reward_of(served)


def test_an_answer_of_ours_never_holds_what_is_no_number():
    body = answer([(0.5, None), (math.nan, "why"), (math.inf, None)])
    assert body == {"scores": [0.5, None, None], "reasons": [None, "why", "the reward is inf"]}


def test_every_reward_can_come_from_a_server_and_then_needs_no_model():
    server = {"server": {"url": "http://localhost:8700"}}
    for name in registry.REWARDS:
        settings = registry.settings_of({name: server}, name)
        assert settings.remote and settings.score_server.url == "http://localhost:8700"
        assert registry.models_of({name: server}, name) == ()
    with pytest.raises(ValueError, match="needs `class: package.module:Class`, or `server:`"):
        registry.settings_of({"mine": {"label": "x"}}, "mine")


@pytest.mark.parametrize("array", [np.zeros((3, 4, 4)), np.array([{}], object)])
def test_an_array_that_is_no_image_is_refused(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    with pytest.raises(ValueError, match=r"\[3, H, W\] of little-endian float32"):
        decode("data:application/x-npy;base64," + base64.b64encode(buffer.getvalue()).decode())
