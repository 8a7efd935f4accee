from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline

from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore, encode, write
from g2rpo_core.data.prompts import Prompt, captions
from g2rpo_core.foundation.errors import UserError


@pytest.fixture(scope="module")
def pipeline(models):
    return FluxPipeline.from_pretrained(models / "pipeline", transformer=None, vae=None)


def test_what_comes_back_is_what_the_pipeline_encodes(pipeline, tmp_path):
    prompts = captions("shapes", 23, 0, testing=False)
    encoded = partial(encode, pipeline, max_length=16, batch=7)
    write(tmp_path / "train", prompts, encoded, "float32", shard_rows=10)
    store, order = EmbeddingStore(tmp_path / "train"), [22, 0, 9, 10, 10]
    assert store.prompts == prompts and len(store) == 23
    texts = [prompts[index].text for index in order]
    with torch.no_grad():
        context, pooled, _ = pipeline.encode_prompt(texts, None, max_sequence_length=16)
    expected = {"context": context, "pooled": pooled}
    torch.testing.assert_close(store.conditioning(order).tensors, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_stored_bit_for_bit(tmp_path):
    context, pooled = torch.randn(5, 3, 4).bfloat16(), torch.randn(5, 6).bfloat16()
    prompts = [Prompt(str(n), "text", "") for n in range(5)]
    rows = lambda part: (
        (
            prompt,
            Conditioning({"context": context[int(prompt.id)], "pooled": pooled[int(prompt.id)]}),
        )
        for prompt in part
    )
    write(tmp_path / "x", prompts, rows, "bfloat16", shard_rows=2)
    stored = EmbeddingStore(tmp_path / "x").conditioning(range(5))
    assert torch.equal(stored.tensors["context"], context.float()) and torch.equal(
        stored.tensors["pooled"], pooled.float()
    )


@pytest.mark.parametrize(
    "gone, complaint",
    [
        (2, r"has 12 prompts of 17: parts at the end are missing"),
        (1, "is missing, but later parts exist"),
    ],
)
def test_missing_parts_are_noticed_wherever_they_were(gone, complaint, here):
    folder = Path("embeddings", "x")
    one = Conditioning({"context": torch.zeros(2, 2), "pooled": torch.zeros(2)})
    prompts = [Prompt(str(number), "text", "") for number in range(17)]
    write(folder, prompts, lambda part: ((prompt, one) for prompt in part), "float32", shard_rows=6)
    assert len(EmbeddingStore(folder)) == 17
    (folder / f"part-{gone:05d}.parquet").unlink()
    with pytest.raises(UserError, match=f"{complaint}.*dvc repro embed"):
        EmbeddingStore(folder)


def test_an_interrupted_store_goes_on_without_encoding_anything_twice(pipeline, tmp_path):
    prompts = captions("shapes", 23, 0, testing=False)
    encoded = partial(encode, pipeline, max_length=16, batch=4)
    write(tmp_path / "whole", prompts, encoded, "float32", shard_rows=6)
    seen = []

    def stopping(part):
        for prompt, row in encoded(part):
            seen.append(prompt)
            if len(seen) == 15:
                raise KeyboardInterrupt
            yield prompt, row

    kept = partial(write, tmp_path / "stopped", prompts, stopping, "float32")
    with pytest.raises(KeyboardInterrupt):
        kept(shard_rows=6, manifests=tmp_path / "manifests")
    kept(shard_rows=6, manifests=tmp_path / "manifests")
    assert seen == prompts[:15] + prompts[12:]
    assert [file.read_bytes() for file in sorted((tmp_path / "whole").iterdir())] == [
        file.read_bytes() for file in sorted((tmp_path / "stopped").iterdir())
    ]
