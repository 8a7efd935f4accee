from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline

from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore, check_lengths, encode, write
from g2rpo_core.data.prompts import Prompt, captions
from g2rpo_core.foundation.errors import UserError


@pytest.fixture(scope="module")
def pipeline(models):
    return FluxPipeline.from_pretrained(models / "pipeline", transformer=None, vae=None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_comes_back_is_what_the_pipeline_encodes(pipeline, tmp_path, dtype):
    pipeline = FluxPipeline.from_pipe(pipeline, dtype=getattr(torch, dtype))
    prompts = captions("shapes", 23, 0, testing=False)
    write(
        tmp_path / "train",
        prompts,
        partial(encode, pipeline, max_length=16, batch=7),
        dtype,
        shard_rows=10,
    )
    store = EmbeddingStore(tmp_path / "train")
    assert store.prompts == prompts and len(store) == 23
    order = [22, 0, 9, 10, 10]
    stored = store.conditioning(order)
    for row, index in enumerate(order):
        with torch.no_grad():
            context, pooled, _ = pipeline.encode_prompt(
                [prompts[index].text], None, max_sequence_length=16
            )
        torch.testing.assert_close(
            stored.tensors["context"][row],
            context[0].to(getattr(torch, dtype)).float(),
            rtol=1e-2 if dtype == "bfloat16" else 1e-5,
            atol=2e-2 if dtype == "bfloat16" else 1e-5,
        )
        torch.testing.assert_close(
            stored.tensors["pooled"][row],
            pooled[0].float(),
            rtol=1e-2 if dtype == "bfloat16" else 1e-5,
            atol=2e-2 if dtype == "bfloat16" else 1e-5,
        )
    pipeline.to(torch.float32)


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


def test_a_prompt_over_the_limit_is_named(pipeline):
    prompts = [Prompt("fine", "a red circle", ""), Prompt("long", "a red circle " * 9, "")]
    check_lengths(prompts[:1], pipeline.tokenizer_2, 16)
    with pytest.raises(UserError, match="prompt long has 28 tokens.*max_sequence_length = 16"):
        check_lengths(prompts, pipeline.tokenizer_2, 16)


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
    prompts, encoded = (
        captions("shapes", 23, 0, testing=False),
        partial(encode, pipeline, max_length=16, batch=4),
    )
    write(tmp_path / "whole", prompts, encoded, "float32", shard_rows=6)
    seen, stopped = [], (tmp_path / "stopped", prompts)

    def stopping(part, after):
        for number, row in enumerate(encoded(part)):
            if len(seen) + number == after:
                raise KeyboardInterrupt
            yield row
        seen.extend(part)

    with pytest.raises(KeyboardInterrupt):
        part = partial(stopping, after=15)
        write(*stopped, part, "float32", shard_rows=6, manifests=tmp_path / "manifests")
    assert seen == prompts[:12]
    part = partial(stopping, after=99)
    write(*stopped, part, "float32", shard_rows=6, manifests=tmp_path / "manifests")
    assert seen == prompts
    assert [file.read_bytes() for file in sorted((tmp_path / "whole").iterdir())] == [
        file.read_bytes() for file in sorted((tmp_path / "stopped").iterdir())
    ]
