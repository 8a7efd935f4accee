"""Encoded prompts in sharded Parquet: written once, read by random access, a row group a few prompts.

Tensors are raw little-endian bytes in `large_binary` columns, uncompressed, without dictionary and statistics: a random
row is one short read. Padding rows of T5 are kept, as FLUX attends to them. The schema's metadata holds shapes and dtype.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from diffusers import FluxPipeline

from g2rpo_core.data.prompts import Prompt
from g2rpo_core.errors import UserError, made_by

ROW_GROUP = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts: context [P, S, D] (T5 states, padding included) and pooled [P, E] (CLIP)."""

    context: torch.Tensor
    pooled: torch.Tensor


def check_lengths(prompts: Sequence[Prompt], tokenizer, limit: int) -> None:
    """UserError naming the first prompt with more than `limit` tokens (end token included): encoding would cut it."""
    for start in range(0, len(prompts), 1024):
        part = prompts[start : start + 1024]
        for prompt, ids in zip(part, tokenizer([p.text for p in part], verbose=False).input_ids):
            if len(ids) > limit:
                raise UserError(
                    f"prompt {prompt.id} has {len(ids)} tokens, over the profile's embed.max_sequence_length = {limit}: "
                    f"shorten it or raise the limit ({prompt.text[:60]!r})"
                )


@torch.no_grad()
def encode(
    pipeline: FluxPipeline, prompts: Sequence[Prompt], max_length: int, batch: int
) -> Iterator[tuple[Prompt, Conditioning]]:
    """Each prompt with its context [S, D] and pooled [E], by the pipeline's own `encode_prompt`."""
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        context, pooled, _ = pipeline.encode_prompt([p.text for p in part], None, max_sequence_length=max_length)
        for row in zip(part, context.cpu(), pooled.cpu()):
            yield row[0], Conditioning(*row[1:])


def write(
    folder: Path,
    prompts: Sequence[Prompt],
    encoded: Callable[[Sequence[Prompt]], Iterator[tuple[Prompt, Conditioning]]],
    dtype: str,
    shard_rows: int,
    progress: Callable[[int], None] = lambda rows: None,
) -> None:
    """Writes part-00000.parquet, ... with `shard_rows` prompts each; the parts that are there are whole and not made again.

    encoded: of `encode`, given the prompts of one part; progress: called with the number of prompts that a part was made of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(prompts), shard_rows)):
        part, path = prompts[start : start + shard_rows], folder / f"part-{number:05d}.parquet"
        if not path.exists():
            aside = path.with_suffix(".tmp")
            _write_part(aside, encoded(part), dtype)
            aside.rename(path)
        progress(len(part))


def _write_part(path: Path, encoded: Iterator[tuple[Prompt, Conditioning]], dtype: str) -> None:
    first = next(encoded)
    meta = {"dtype": dtype, "context": list(first[1].context.shape), "pooled": list(first[1].pooled.shape)}
    schema = pa.schema(
        [("id", pa.string()), ("prompt", pa.string()), ("style", pa.string()), ("context", pa.large_binary()), ("pooled", pa.large_binary())],
        metadata={"g2rpo": json.dumps(meta)},
    )  # fmt: skip
    encoded = chain([first], encoded)
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False, write_statistics=False) as writer:
            while rows := [_row(*one, DTYPES[dtype]) for one in islice(encoded, ROW_GROUP)]:
                writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=ROW_GROUP)
        file.flush()
        os.fsync(file.fileno())


def _row(prompt: Prompt, conditioning: Conditioning, dtype: torch.dtype) -> dict:
    tensors = {name: _to_bytes(getattr(conditioning, name), dtype) for name in ("context", "pooled")}
    return {"id": prompt.id, "prompt": prompt.text, "style": prompt.style, **tensors}


class EmbeddingStore:
    """Random access to a folder of `write`; holds the texts in memory and reads tensors when asked."""

    def __init__(self, folder: Path):
        made_by("embed", folder / "part-00000.parquet")
        self._files = [pq.ParquetFile(file, memory_map=True) for file in sorted(folder.glob("part-*.parquet"))]
        self._meta = json.loads(self._files[0].schema_arrow.metadata[b"g2rpo"])
        self._places, self.prompts = [], []
        for number, file in enumerate(self._files):
            texts = file.read(columns=["id", "prompt", "style"]).to_pylist()
            self._places += [(number, *divmod(row, ROW_GROUP)) for row in range(len(texts))]
            self.prompts += [Prompt(row["id"], row["prompt"], row["style"]) for row in texts]

    def __len__(self) -> int:
        return len(self.prompts)

    def conditioning(self, indices: Sequence[int]) -> Conditioning:
        """The stacked encodings of some prompts, float32: context [P, S, D], pooled [P, E]."""
        rows = []
        for index in indices:
            file, group, offset = self._places[index]
            rows.append(self._files[file].read_row_group(group, columns=["context", "pooled"]).slice(offset, 1).to_pylist()[0])
        dtype = DTYPES[self._meta["dtype"]]
        stacked = {
            name: torch.stack([_from_bytes(row[name], dtype, self._meta[name]) for row in rows]) for name in ("context", "pooled")
        }
        return Conditioning(**stacked)


def _to_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    return tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).float()
