import base64
import io

import numpy as np
import pandas as pd
from PIL import Image

from g2rpo_core.config.comparisons import TRAINING
from g2rpo_core.reporting.images import CHANGED, DRAWN, FIRST, LARGE, THUMBNAIL, choose, embed_image
from g2rpo_core.reporting.render import _once


def test_a_small_image_goes_in_as_it_is(tmp_path):
    file = tmp_path / "small.png"
    Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (LARGE, LARGE, 3), dtype=np.uint8)
    ).save(file)
    shown = embed_image(file, tmp_path)
    assert (
        shown.link is None
        and base64.b64decode(shown.source.removeprefix("data:image/png;base64,"))
        == file.read_bytes()
    )


def test_a_large_image_is_a_thumbnail_that_leads_to_the_lossless_file(tmp_path):
    file = tmp_path / "evaluations" / "run" / "large one.png"
    file.parent.mkdir(parents=True)
    Image.new("RGB", (1024, 768), "red").save(file)
    shown = embed_image(file, tmp_path / "reports")
    small = Image.open(
        io.BytesIO(base64.b64decode(shown.source.removeprefix("data:image/webp;base64,")))
    )
    assert (
        small.size == (THUMBNAIL, THUMBNAIL * 3 // 4)
        and shown.link == "../evaluations/run/large one.png"
    )


def test_a_page_with_six_models_at_1024_pixels_stays_below_ten_megabytes(tmp_path):
    """Detail at every scale, as photographs have: more than a thumbnail can hold."""
    rng = np.random.default_rng(0)
    sizes = []
    for number in range(6):
        image = sum(
            np.kron(
                rng.normal(0, 2.0**level, (1024 >> level, 1024 >> level, 3)),
                np.ones((1 << level, 1 << level, 1)),
            )
            for level in range(8)
        )
        file = tmp_path / f"{number}.png"
        Image.fromarray(np.clip(128 + image / 4, 0, 255).astype(np.uint8)).save(
            file, compress_level=1
        )
        sizes.append(len(embed_image(file, tmp_path).source))
    prompts = 2 * CHANGED + DRAWN + 3 * FIRST * 2 / len(sizes)
    assert prompts * sum(sizes) + 1_500_000 < 10_000_000  # with charts, their library and tables


def test_prompts_are_chosen_by_their_change_and_by_a_draw_without_a_look_at_it():
    ids = [f"p{number:03}" for number in range(50)]
    change = pd.Series(np.linspace(-0.2, 1, 49), ids[:49])  # p049 has no score
    chosen = choose(change, ids)
    assert list(chosen["rose most"]) == ["p048", "p047", "p046"]
    assert chosen["fell most"] == {key: change[key] for key in ["p000", "p001", "p002"]}
    drawn = list(chosen["drawn at random"])
    assert len(set(drawn)) == DRAWN and drawn == list(choose(-change, ids)["drawn at random"])
    # What did not change is neither
    assert not choose(0 * change, ids)["rose most"] and not choose(0 * change, ids)["fell most"]


def test_a_single_training_reward_has_one_panel():
    rows = pd.DataFrame({"reward": [TRAINING, "hps", "clip_score"]})
    shown = lambda weights: list(_once(rows, weights).reward)
    assert shown({"g2rpo": {"hps": 1.0}, "dance_grpo": {"hps": 1.0}}) == ["hps", "clip_score"]
    for several in (
        {"g2rpo": {"hps": 1.0, "clip_score": 1.0}},
        {"g2rpo": {"hps": 2.0}},
        {"g2rpo": {"hps": 1.0}, "dance_grpo": {"clip_score": 1.0}},
        {"g2rpo": {"hps": 1.0}, "published": {}},
    ):
        assert shown(several) == list(rows.reward)
