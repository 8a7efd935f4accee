"""Rewards by server: what the client makes of answers of every kind."""

import base64
import gzip
import io
import json
import math
import random
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo_core.config import load_profile
from g2rpo_core.estimate.machines import checked_machines
from g2rpo_core.estimate.plan import make_plan
from g2rpo_core.foundation.errors import TransientError, UserError
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.limits import LONGEST_TEXT
from g2rpo_core.rewards.remote import MOST_BYTES, HttpClient
from g2rpo_core.rewards.reward_protocol import answer, decode, encode, read_answer
from g2rpo_core.rewards.scoring import score_all
from g2rpo_core.rewards.spec import ServerSettings
from tests.conftest import ROOT
from tests.fixtures.errors import refused
from tests.fixtures.images import IMAGES, SEEN, photograph
from tests.fixtures.loopback import Handler, loopback
from tests.fixtures.score_server import HEALTH, answering

IMAGES_8 = torch.rand(8, 3, 6, 5, generator=torch.Generator().manual_seed(0))
PROMPTS = [f"prompt {number}" for number in range(8)]
MOST = 10**9


def reward_of(served, name="hps", **server):
    """Quick where a server of a test fails: waits of milliseconds."""
    url = served if isinstance(served, str) else served.url
    entry = {"server": {"url": url, "backoff": 0.001, "timeout": 30, "tries": 2, **server}}
    return registry.load([name], ROOT / "nowhere", section={name: entry})[name]


def good(body, number):
    """Each image's score is the number in its prompt."""
    return 200, json.dumps(
        {"scores": [float(prompt.split()[1]) for prompt in body["prompts"]]}
    ).encode()


@pytest.mark.parametrize("form, media", [("float32", "application/x-npy"), ("png", "image/png")])
def test_every_image_gets_its_own_score_and_arrives_as_it_was(form, media):
    with answering(good) as served:
        scores, reasons = reward_of(
            served, images=form, max_images_per_request=3
        ).score_with_reasons(IMAGES_8, PROMPTS)
    assert (
        scores.tolist() == list(range(8))
        and scores.dtype == torch.float32
        and reasons == [None] * 8
    )
    assert sorted(len(body["images"]) for body in served.bodies) == [2, 3, 3]
    for body in served.bodies:
        for prompt, url in zip(body["prompts"], body["images"]):
            sent, original = decode(url, MOST)[0], IMAGES_8[PROMPTS.index(prompt)]
            assert url.startswith(f"data:{media};base64,")
            if form == "float32":
                assert torch.equal(sent, original)
            else:
                assert (
                    sent.tobytes()
                    == (original * 255).round().byte().permute(1, 2, 0).numpy().tobytes()
                )


def test_files_are_sent_as_they_are_with_their_palette_and_on_white():
    for image in SEEN.values():
        sent = decode(encode([image], "float32")[0], MOST)[0]
        assert (
            sent.mode == image.mode
            and sent.convert("RGB").tobytes() == image.convert("RGB").tobytes()
        )
    sent = decode(encode([IMAGES["transparent"]], "float32")[0], MOST)[0]
    assert sent.mode == "RGB" and sent.tobytes() == SEEN["transparent"].tobytes()
    printed = photograph(9, 7).convert("CMYK")
    assert (
        decode(encode([printed], "png")[0], MOST)[0].tobytes() == printed.convert("RGB").tobytes()
    )


def test_a_bfloat16_image_arrives_exactly():
    image = IMAGES_8[:1].bfloat16()
    assert torch.equal(decode(encode(image, "float32")[0], MOST)[0], image[0].float())


def replied(text: str):
    return lambda body, number: (200, text.encode())


@pytest.mark.parametrize(
    "reply, reason",
    [
        (replied('{"scores": [NaN, 1]}'), "the score is nan"),
        (replied('{"scores": [Infinity, 1]}'), "the score is inf"),
        (replied('{"scores": [-Infinity, 1]}'), "the score is -inf"),
        (replied('{"scores": [1e39, 1]}'), "the score is 1e+39"),
        (replied('{"scores": [1' + "0" * 400 + ", 1]}"), "the score is 1000"),
        (replied('{"scores": ["0.5", 1]}'), "not a number: '0.5'"),
        (replied('{"scores": [true, 1]}'), "not a number: 'True'"),
        (replied('{"scores": [[0.5], 1]}'), "not a number: '[0.5]'"),
        (replied('{"scores": [null, 1]}'), "the server gave neither a score nor a reason"),
        (replied('{"scores": [null, 1], "reasons": ["too dark", null]}'), "the server: too dark"),
    ],
)
def test_what_is_no_number_is_missing_and_the_others_stand(reply, reason):
    with answering(reply) as served:
        scores, reasons = score_all({"hps": reward_of(served)}, IMAGES_8[:2], PROMPTS[:2])
    assert (
        math.isnan(scores[0, 0])
        and scores[0, 1] == 1
        and reason in reasons[0][0]
        and reasons[0][1] is None
    )


@pytest.mark.parametrize(
    "reply, reason, asked",
    [
        (replied('{"scores": [1, 2, 3]}'), "not scores: 3 scores and 2 reasons for 2 images", 1),
        (replied('{"scores": []}'), "0 scores", 1),
        (replied('{"scores": [1]}'), "1 scores", 1),
        (replied('{"scores": [1, 2], "reasons": [null]}'), "2 scores and 1 reasons", 1),
        (replied('{"scores": 1}'), "int scores", 1),
        (replied('{"scores": {"0": 1, "1": 2}}'), "dict scores", 1),
        (replied('{"score": [1, 2]}'), "not an answer with scores", 1),
        (replied("[1, 2]"), "not an answer with scores", 1),
        (replied("<html>"), "not an answer with scores: '<html>'", 1),
        (replied(""), "not an answer with scores", 1),
        (replied('{"scores": [1, 2]'), "not an answer with scores", 1),
        (
            lambda body, number: (422, b'{"detail": "images: 0: not a PNG"}'),
            "no answer: status 422",
            1,
        ),
        (lambda body, number: (500, b'{"detail": "hps failed"}'), "hps failed\"}' (2 tries)", 2),
        (lambda body, number: None, "(2 tries)", 2),
        (
            lambda body, number: (200, bytes(MOST_BYTES + 1)),
            "no answer: an answer of over 64 MiB",
            1,
        ),
    ],
)
def test_an_answer_that_is_none_leaves_every_score_of_its_request_missing(reply, reason, asked):
    with answering(reply) as served:
        scores, reasons = reward_of(served).score_with_reasons(IMAGES_8[:2], PROMPTS[:2])
    assert (
        scores.isnan().all()
        and all(reason in why for why in reasons)
        and len(served.bodies) == asked
    )


def test_a_slow_answer_is_asked_for_again():
    first = threading.Event()

    def slow(body, number):
        if number == 0:
            first.wait(60)
        return good(body, number)

    try:
        with answering(slow) as served:
            scores = reward_of(served, timeout=1, tries=5)(IMAGES_8[:2], PROMPTS[:2])
            first.set()
    finally:
        first.set()
    assert scores.tolist() == [0, 1] and len(served.bodies) >= 2


class Healthy(Handler):
    def do_GET(self):
        asked.append(self.headers["Accept-Encoding"])
        self.say((200, {}, json.dumps(HEALTH).encode()))


asked: list[str] = []  # encodings


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_server_that_sends_a_byte_at_a_time_is_not_waited_for(part):
    """Each byte comes in time, the whole never."""
    over = threading.Event()

    class Dripping(Healthy):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\n" if part == "headers" else b"HTTP/1.1 200 OK\r\n\r\n"
            )
            while not over.wait(0.1):
                self.wfile.write(b"x")

    with loopback(Dripping) as url:
        reward = reward_of(url, timeout=1)
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(reward.score_with_reasons(IMAGES_8[:1], PROMPTS[:1])),
            daemon=True,
        )
        asking.start()
        asking.join(60)
        over.set()
    assert answers and answers[0][1] == ["no answer: no whole answer within 1 s (2 tries)"]


def test_no_answer_is_unpacked():
    """A small answer could become one of gigabytes: the client asks for none, and takes none."""

    class Packing(Healthy):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.say(
                (
                    200,
                    {"Content-Encoding": "gzip"},
                    gzip.compress(json.dumps({"scores": [1.0]}).encode()),
                )
            )

    with loopback(Packing) as url:
        _, reasons = reward_of(url).score_with_reasons(IMAGES_8[:1], PROMPTS[:1])
    assert asked[-1] == "identity" and reasons == [
        "no answer: a compressed answer, which was not asked for"
    ]


def test_an_address_with_a_password_is_refused_without_repeating_it():
    for url in ("http://user:s3cret@gpu1:8700", "https://s3cret@gpu1", "user:s3cret@gpu1/x"):
        for name in ("hps", "unified_reward"):
            with pytest.raises(ValueError) as error:
                registry.settings_of({name: {"server": {"url": url}}}, name)
            assert "holds a name or password" in str(error.value) and "s3cret" not in str(
                error.value
            )
    assert registry.settings_of({"hps": {"server": {"url": "http://gpu1:8700/a@b"}}}, "hps").remote


def test_a_key_that_leaves_the_machine_unencrypted_is_warned_of(monkeypatch, capsys):
    monkeypatch.setenv("REWARD_KEY", "k3y")
    for url, warned in (
        ("http://gpu1:8700", True),
        ("https://gpu1", False),
        ("http://localhost:1", False),
        ("http://[::1]:1", False),
    ):
        HttpClient(ServerSettings(url=url, key_variable="REWARD_KEY"), "rewards.hps.server")
        said = capsys.readouterr().err
        assert (
            "the key of REWARD_KEY is sent unencrypted to http://gpu1:8700" in said
        ) == warned and "k3y" not in said


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_every_request_ends_the_run(status):
    with answering(lambda body, number: (status, b"go away")) as served:
        reward = reward_of(served)
        with pytest.raises(
            UserError,
            match=f"rewards.hps.server: .*/score .* answers with status {status}: 'go away'",
        ):
            reward(IMAGES_8, PROMPTS)


@pytest.mark.parametrize(
    "health, server, message",
    [
        (HEALTH | {"reward": "pickscore"}, {}, r"serves 'pickscore' \(HPS\), not 'hps'"),
        (HEALTH, {"reward": "hps_of_ours"}, r"serves 'hps' \(HPS\), not 'hps_of_ours'"),
        (HEALTH, {"version": "8"}, "rewards.hps.server.version: .* serves version 7, not 8"),
        (HEALTH | {"images": ["image/png"]}, {}, "reads image/png only: set images: png"),
        (HEALTH | {"images": ["image/jpeg"]}, {}, "reads image/jpeg, not image/png"),
        (HEALTH | {"protocol": 2}, {}, "is not a score server: protocol: "),
        ({"reward": "hps"}, {}, "is not a score server: label: Field required"),
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
    loading = refused("status 503: 'loading'", TransientError)
    with answering(good, (503, b"loading")) as served, loading:
        reward_of(served)


def test_the_server_may_know_it_by_another_name_and_say_how_many_images_it_takes():
    with answering(
        good, HEALTH | {"reward": "v2", "max_images": 2, "images": ["image/png"]}
    ) as served:
        reward = reward_of(served, "mine", reward="v2", version="7", images="png")
        assert reward(IMAGES_8, PROMPTS).tolist() == list(range(8))
    assert [len(body["images"]) for body in served.bodies] == [2] * 4


def test_an_answer_of_ours_never_holds_what_is_no_number():
    body = answer([(0.5, None), (math.nan, "why"), (math.inf, None)])
    assert body == {"scores": [0.5, None, None], "reasons": [None, "why", "the reward is inf"]}
    assert read_answer(json.dumps(body).encode(), 3)[0] == (0.5, None)


SERVER = {"server": {"url": "http://localhost:8700"}}


def test_every_reward_can_come_from_a_server_and_then_needs_no_model():
    for name in registry.REWARDS:
        settings = registry.settings_of({name: SERVER}, name)
        assert settings.remote and settings.score_server.url == "http://localhost:8700"
        assert registry.models_of({name: SERVER}, name) == ()
    section = {"mine": {**SERVER, "label": "My own"}}
    assert (
        registry.settings_of(section, "mine").remote
        and registry.labels(section)["mine"] == "My own"
    )
    with pytest.raises(ValueError, match="needs `class: package.module:Class`, or `server:`"):
        registry.settings_of({"mine": {"label": "x"}}, "mine")
    chat = {"server": {"url": "http://localhost:8000/v1", "model": "vlm"}}
    assert registry.settings_of({"unified_reward": chat}, "unified_reward").score_server is None
    with pytest.raises(
        ValueError, match="rewards.unified_reward.server: images is a setting of score servers"
    ):
        registry.settings_of(
            {"unified_reward": {"server": {**chat["server"], "images": "png"}}}, "unified_reward"
        )


def test_a_profile_with_a_served_reward_needs_neither_its_models_nor_memory_for_it(tmp_path):
    for name in ("flux_hps_clip", "flux_hps"):
        (tmp_path / f"{name}.yaml").symlink_to(ROOT / "profiles" / f"{name}.yaml")
    text = "extends: flux_hps_clip\nmodels: {repos: {hps: null}}\n"
    (tmp_path / "without.yaml").write_text(text)
    with pytest.raises(UserError, match="hps needs hps in models.repos"):
        load_profile(tmp_path / "without.yaml")
    (tmp_path / "served.yaml").write_text(
        text + "rewards: {hps: {server: {url: 'http://gpu1:8700'}}}\n"
    )
    served, here = (
        load_profile(tmp_path / "served.yaml"),
        load_profile(tmp_path / "flux_hps_clip.yaml"),
    )
    machines = checked_machines("plan", 16, 141, 2, 450, 50)
    plans = [make_plan(profile, "g2rpo", machines) for profile in (served, here)]
    assert plans[0].not_counted == ["hps"] and plans[1].not_counted == []
    assert plans[1].memory_gib["rewards"] == pytest.approx(
        2 * plans[0].memory_gib["rewards"], abs=0.01
    )
    assert plans[1].disk_gib["rewards"] > plans[0].disk_gib["rewards"]


@pytest.mark.parametrize(
    "url, message",
    [
        ("http://here/x.png", "not a data URL of image/png or application/x-npy in base64"),
        ("data:image/jpeg;base64,AAAA", "not a data URL"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png;base64,AAAA", "not a PNG that can be read"),
        ("data:application/x-npy;base64,AAAA", "magic string"),
    ],
)
def test_what_is_no_image_is_refused(url, message):
    with pytest.raises(ValueError, match=message):
        decode(url, MOST)


@pytest.mark.filterwarnings("ignore")
def test_bytes_that_were_damaged_are_an_image_or_refused():
    draw = random.Random(0)
    whole = [encode([Image.new(mode, (9, 7))], "png")[0] for mode in ("1", "P", "RGBA")] + encode(
        IMAGES_8[:1], "float32"
    )
    refused = 0
    for _ in range(2000):
        head, _, text = draw.choice(whole).partition(",")
        data = bytearray(base64.b64decode(text))
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            data[place : place + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        try:
            decode(f"{head},{base64.b64encode(data).decode()}", 10**6)
        except ValueError:
            refused += 1
    assert refused > 1000


def test_an_array_that_is_no_image_or_larger_than_it_says_is_refused():
    def url_of(array) -> str:
        buffer = io.BytesIO()
        np.save(buffer, array)
        return "data:application/x-npy;base64," + base64.b64encode(buffer.getvalue()).decode()

    for array in (
        np.zeros((4, 4, 3), np.float32),
        np.zeros((3, 4, 4)),
        np.zeros((3, 4), np.float32),
        np.array([{}], object),
    ):
        with pytest.raises(ValueError, match=r"\[3, H, W\] of little-endian float32"):
            decode(url_of(array), MOST)
    whole = url_of(np.zeros((3, 40, 40), np.float32))
    with pytest.raises(
        ValueError, match="1600 pixels; the images of a request may have 1599 in all"
    ):
        decode(whole, 1599)
    data = base64.b64decode(whole.partition(",")[2]).replace(
        b"(3, 40, 40)", b"(3, 90, 90)"
    )  # says more than it holds
    with pytest.raises(ValueError, match="19200 bytes of values"):
        decode("data:application/x-npy;base64," + base64.b64encode(data).decode(), MOST)
    with pytest.raises(ValueError, match="400000000 pixels"):
        decode(encode([Image.new("1", (20_000, 20_000))], "png")[0], 2**28)


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://h:x", "http://h:99999", "http://h:-1", "http:///x", "http://xn--/"],
)
def test_what_is_no_address_is_refused_with_the_settings(url):
    for name in ("hps", "unified_reward"):
        with pytest.raises(ValueError, match=f"rewards.{name}.server.url: .*is no address"):
            registry.settings_of({name: {"server": {"url": url, "key_variable": "K"}}}, name)


def test_what_a_server_says_is_kept_in_few_characters_and_values():
    """Megabytes of reasons were kept in a column."""
    long = "x" * 10**6
    reply = lambda body, number: (200, json.dumps({"scores": [None], "reasons": [long]}).encode())
    with answering(reply, HEALTH | {"note": long, "label": long}) as served:
        reward = reward_of(served)
        (reason,) = reward.score_with_reasons(IMAGES_8[:1], PROMPTS[:1])[1]
    assert {len(reward.health.note), len(reward.health.label)} == {LONGEST_TEXT + 1}
    assert len(reason) < LONGEST_TEXT + 30 and reason.endswith("…")
    for about in ({"version": long}, {"reward": long}, {"images": ["image/png"] * 1000}):
        with answering(good, HEALTH | about) as served, refused("is not a score server", UserError):
            reward_of(served)
    many = lambda body, number: (200, b'{"scores": [' + b"[]," * 10**6 + b"[]]}")
    with answering(many) as served:
        (reason,) = reward_of(served).score_with_reasons(IMAGES_8[:1], PROMPTS[:1])[1]
    assert reason == "not scores: an answer of over 100,000 values"
