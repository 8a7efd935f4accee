import base64
import io

import numpy as np
import pandas as pd
from PIL import Image

from g2rpo_core.reporting.images import DRAWN, THUMBNAIL, choose, embed_image


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
