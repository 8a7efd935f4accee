"""Stores encoded prompts in sharded Parquet: written once, read by random access.

`Architecture.encoding` says which tensors a prompt has. They are raw little-endian bytes in
`large_binary` columns, a few prompts per row group, uncompressed, without dictionary or statistics,
so that a random row is one short read. Padding rows of T5 are kept because models attend to them.
The schema's metadata holds shapes, dtype and the number of prompts in all parts. Where a base model
needs the empty prompt, for classifier-free guidance, its encoding is in a file of its own, once. A
set that is encoded online, during training, has its texts alone, in one part whose metadata holds
the length in tokens.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from diffusers import DiffusionPipeline

from g2rpo_core.architectures.table import ARCHITECTURES, text_encoders
from g2rpo_core.data import LONGEST
from g2rpo_core.data.prompts import Prompt, note_longer
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaint, existing, in_one_line, reading, whole
from g2rpo_core.foundation.manifest import find_whole, write_manifest
from g2rpo_core.foundation.texts import natural, visible

ROW_GROUP = 4
COLUMNS = ("id", "prompt", "style")
NEGATIVE = "negative.parquet"  # the empty prompt
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Conditioning:
    """The encodings of P prompts."""

    tensors: Mapping[str, torch.Tensor]
    """Name -> [P, ...], such as context [P, S, D] (padding included) and pooled [P, E]."""
    negative: Mapping[str, torch.Tensor] | None = None
    """The encoding of the empty prompt, name -> [1, ...], where the base model needs it."""
    unpadded: bool = False
    """Whether no text has padding, so that nothing need be masked."""
    length: int | None = None
    """Tokens of a text before padding was cut (`Policy.cut`); None: as in `tensors`.

    A call has room for these.
    """

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def repeated(self, count: int) -> "Conditioning":
        """Repeat the encoding of one prompt `count` times."""
        return replace(
            self,
            tensors={
                name: tensor.expand(count, *tensor.shape[1:])
                for name, tensor in self.tensors.items()
            },
        )


def over_limit(prompts: Sequence[Prompt], tokenizer, limit: int) -> list[tuple[int, Prompt]]:
    """Return the prompts over `limit` tokens (with end token), and their tokens; longest first."""
    lengths: list[tuple[int, Prompt]] = []
    for start in range(0, len(prompts), 1024):
        part = prompts[start : start + 1024]
        lengths += [
            (len(ids), prompt)
            for prompt, ids in zip(part, tokenizer([p.text for p in part], verbose=False).input_ids)
        ]
    return sorted([each for each in lengths if each[0] > limit], key=lambda each: -each[0])


def check_lengths(prompts: Sequence[Prompt], tokenizer, limit: int) -> None:
    """Check that encoding cuts no prompt; UserError naming those over `limit`, longest first.

    It advises a higher limit only where the text encoder was trained with that many.
    """
    if not (long := over_limit(prompts, tokenizer, limit)):
        return
    named = in_one_line(
        [
            f"prompt {prompt.id} has {length} tokens ({visible(prompt.text[:60])!r})"
            for length, prompt in long
        ]
    )
    most, known = long[0][0], min(LONGEST, tokenizer.model_max_length)
    raised = f"or set {most}" if most <= known else f"because this model knows at most {known}"
    raise UserError(
        f"{named}: {len(long)} of {len(prompts)} are over the profile's embed.max_sequence_length "
        f"= {limit}: shorten them, {raised}"
    )


def note_short_encoders(prompts: Sequence[Prompt], pipeline: DiffusionPipeline) -> None:
    """Print how many prompts each short text encoder, such as CLIP's, cuts, and the longest."""
    base = ARCHITECTURES[type(pipeline).__name__]
    lengths: dict[int, list[tuple[str, int]]] = {}
    for part, kind in base.tokenizers.items():
        tokenizer = getattr(pipeline, part)
        if part == base.long_tokenizer or tokenizer.model_max_length in lengths:
            continue  # `check_lengths` is its own; and several of one length say the same
        texts = [prompt.text for prompt in prompts]
        counts = [len(ids) for ids in tokenizer(texts, verbose=False).input_ids]
        lengths[tokenizer.model_max_length] = list(zip(texts, counts))
        note_longer(
            f"the base model's {kind} text encoder",
            lengths[tokenizer.model_max_length],
            tokenizer.model_max_length,
        )


def without_long(prompts: Sequence[Prompt], tokenizer, limit: int) -> Sequence[Prompt]:
    """Leave out the prompts that encoding would cut; UserError if none is left.

    In a data set nobody can shorten them.
    """
    long = {prompt.id for _, prompt in over_limit(prompts, tokenizer, limit)}
    if len(long) == len(prompts):
        check_lengths(prompts, tokenizer, limit)
    return [prompt for prompt in prompts if prompt.id not in long]


@torch.no_grad()
def encode(
    pipeline: DiffusionPipeline, prompts: Sequence[Prompt], max_length: int, batch: int
) -> Iterator[tuple[Prompt, Conditioning]]:
    """Encode prompts by the pipeline's own `encode_prompt`; yield each with its encoding.

    Such as context [S, D] and pooled [E]. Its warnings of single prompts that are cut are left out:
    `note_short_encoders` counts them.
    """
    logging.getLogger("diffusers.pipelines").setLevel(logging.ERROR)
    base = ARCHITECTURES[type(pipeline).__name__]
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        encoded = {
            name: tensor.cpu()
            for name, tensor in base.encode(pipeline, [p.text for p in part], max_length).items()
        }
        for row, prompt in enumerate(part):
            yield prompt, Conditioning({name: tensor[row] for name, tensor in encoded.items()})


def encode_negative(
    pipeline: DiffusionPipeline, max_length: int
) -> Mapping[str, torch.Tensor] | None:
    """Encode the empty prompt, name -> [1, ...]; None for a base model that does not need it."""
    base = ARCHITECTURES[type(pipeline).__name__]
    if not base.has_negative:
        return None
    ((_, empty),) = encode(pipeline, [Prompt("negative", base.negative, "")], max_length, 1)
    return {name: tensor[None] for name, tensor in empty.tensors.items()}


def write(
    folder: Path,
    prompts: Sequence[Prompt],
    encoded: Callable[[Sequence[Prompt]], Iterator[tuple[Prompt, Conditioning]]],
    dtype: str,
    shard_rows: int,
    progress: Callable[[int], None] = lambda rows: None,
    manifests: Path | None = None,
) -> None:
    """Write part-00000.parquet, ... with `shard_rows` prompts each.

    encoded: calls `encode` on the prompts of one part; progress: called with the number of prompts
    in a part; manifests: the folder for a manifest of each part, by which an interrupted call's
    parts are used again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(prompts), shard_rows)):
        part, path = prompts[start : start + shard_rows], folder / f"part-{number:05d}.parquet"
        manifest = manifests / f"{path.stem}.json" if manifests else None
        if not manifest or find_whole(manifest, folder) is None:
            _write_part(path, encoded(part), dtype, len(prompts))
            if manifest:
                write_manifest(manifest, folder, [path.name])
        progress(len(part))


def write_online(folder: Path, prompts: Sequence[Prompt], dtype: str, max_length: int) -> None:
    """Write the texts of prompts that `EmbeddingStore` encodes when they are needed.

    The encodings are those that `encode` and `write` would have stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"dtype": dtype, "online": max_length, "prompts": len(prompts)}
    _write_whole(folder / "part-00000.parquet", meta, [], [[_texts(prompt) for prompt in prompts]])


def write_negative(folder: Path, negative: Mapping[str, torch.Tensor] | None, dtype: str) -> None:
    """Write the encoding of the empty prompt into the folder of the others, if there is one."""
    if negative is not None:
        folder.mkdir(parents=True, exist_ok=True)
        row = Conditioning({name: tensor[0] for name, tensor in negative.items()})
        _write_part(folder / NEGATIVE, iter([(Prompt("negative", "", ""), row)]), dtype, 1)


def _write_part(
    path: Path, encoded: Iterator[tuple[Prompt, Conditioning]], dtype: str, prompts: int
) -> None:
    first = next(encoded)
    shapes = {name: list(tensor.shape) for name, tensor in first[1].tensors.items()}
    encoded = chain([first], encoded)
    groups = iter(lambda: [_row(*pair, DTYPES[dtype]) for pair in islice(encoded, ROW_GROUP)], [])
    _write_whole(path, {"dtype": dtype, **shapes, "prompts": prompts}, shapes, groups)


def _write_whole(
    path: Path, meta: dict, tensors: Iterable[str], groups: Iterable[list[dict]]
) -> None:
    """Write a part under another name first, so that a part that exists is complete."""
    schema = pa.schema(
        [
            *((name, pa.string()) for name in COLUMNS),
            *((name, pa.large_binary()) for name in tensors),
        ],
        metadata={"g2rpo": json.dumps(meta)},
    )
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        with pq.ParquetWriter(
            file, schema, compression="none", use_dictionary=False, write_statistics=False
        ) as writer:
            for rows in groups:
                writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=len(rows))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _row(prompt: Prompt, conditioning: Conditioning, dtype: torch.dtype) -> dict:
    as_bytes = lambda tensor: tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    tensors = {name: as_bytes(tensor) for name, tensor in conditioning.tensors.items()}
    return _texts(prompt) | tensors


def _texts(prompt: Prompt) -> dict[str, str]:
    return {"id": prompt.id, "prompt": prompt.text, "style": prompt.style}


class EmbeddingStore:
    """A folder written by `write` or `write_online`, with random access.

    It holds the texts in memory, and reads or encodes on request.
    """

    def __init__(self, folder: Path):
        # Open every part, each of the same dtype, shapes and number of prompts
        existing(folder / "part-00000.parquet")
        self._paths = sorted(folder.glob("part-*.parquet"), key=lambda path: natural(path.name))
        self._files: list[pq.ParquetFile] = []
        self._places: list[tuple[int, int, int]] = []
        self.prompts: list[Prompt] = []
        self._meta: dict = {}
        for number, path in enumerate(self._paths):
            if path.name != f"part-{number:05d}.parquet":
                raise UserError(
                    complaint(
                        folder / f"part-{number:05d}.parquet", "is missing, but later parts exist"
                    )
                )
            file, meta, prompts = _open_part(path)
            if number and meta != self._meta:
                raise UserError(
                    complaint(
                        path,
                        f"does not belong to {self._paths[0].name}: different dtype, "
                        "shapes or number of prompts",
                    )
                )
            self._meta = meta
            self._files.append(file)
            self._places += [(number, *divmod(row, ROW_GROUP)) for row in range(len(prompts))]
            self.prompts += prompts
        self._encoders: DiffusionPipeline | None = None
        # All parts together hold all prompts
        if (expected := self._meta["prompts"]) != len(self):
            raise UserError(
                complaint(
                    folder, f"has {len(self)} prompts of {expected}: parts at the end are missing"
                )
            )
        self._negative = self._read_negative(folder / NEGATIVE)

    def _read_negative(self, path: Path) -> Mapping[str, torch.Tensor] | None:
        if not path.exists():
            return None
        file, meta, _ = _open_part(path)
        about = {"dtype": meta["dtype"]} if "online" in self._meta else meta
        if self._meta | about | {"prompts": self._meta["prompts"]} != self._meta:
            raise UserError(
                complaint(
                    path, f"does not belong to {self._paths[0].name}: different dtype or shapes"
                )
            )
        return {
            name: tensor[None]
            for name, tensor in _read_row(path, file, meta, 0, 0, "negative").items()
        }

    def __len__(self) -> int:
        return len(self.prompts)

    def load_encoders(self, pipeline: Path, device: torch.device) -> None:
        """Load a pipeline's text encoders onto a device, if these prompts are encoded online."""
        if "online" in self._meta:
            self._encoders = text_encoders(pipeline, dtype=DTYPES[self._meta["dtype"]]).to(device)

    def conditioning(self, indices: Sequence[int]) -> Conditioning:
        """Read or encode some prompts, and stack their encodings, float32: name -> [P, ...].

        ValueError without the encoders that it needs.
        """
        if "online" in self._meta:
            return self._encode([self.prompts[index] for index in indices])
        rows = [
            _read_row(
                self._paths[file],
                self._files[file],
                self._meta,
                group,
                offset,
                self.prompts[index].id,
            )
            for index in indices
            for file, group, offset in [self._places[index]]
        ]
        return Conditioning(
            {name: torch.stack([row[name] for row in rows]) for name in _tensor_shapes(self._meta)},
            self._negative,
        )

    def _encode(self, prompts: list[Prompt]) -> Conditioning:
        if self._encoders is None:
            raise ValueError(
                f"{self._paths[0].parent} holds no encodings: call load_encoders first"
            )
        rows = [
            one.tensors
            for _, one in encode(self._encoders, prompts, self._meta["online"], len(prompts))
        ]
        stacked = {
            name: torch.stack([row[name] for row in rows]).to(DTYPES[self._meta["dtype"]]).float()
            for name in rows[0]
        }
        return Conditioning(stacked, self._negative)


def _read_row(
    path: Path, file: pq.ParquetFile, meta: dict, group: int, offset: int, prompt: str
) -> dict[str, torch.Tensor]:
    shapes = _tensor_shapes(meta)
    with reading(path):
        row = file.read_row_group(group, columns=list(shapes)).slice(offset, 1).to_pylist()[0]
        from_bytes = lambda data: torch.frombuffer(bytearray(data), dtype=DTYPES[meta["dtype"]])
        tensors = {
            name: from_bytes(row[name]).view(shape).float() for name, shape in shapes.items()
        }
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise UserError(complaint(path, f"prompt {prompt} has numbers that are not finite"))
    return tensors


def _tensor_shapes(meta: dict) -> dict[str, list[int]]:
    """Return the tensors of a prompt and their shapes, from a file's metadata."""
    return {name: value for name, value in meta.items() if isinstance(value, list)}


def _open_part(path: Path) -> tuple[pq.ParquetFile, dict, list[Prompt]]:
    """Open a part written by `write`: file, metadata and prompts; UserError if it is incomplete."""
    whole(path)
    with reading(path):
        if path.open("rb").read(4) != b"PAR1":  # Arrow only looks at the end
            raise UserError(
                complaint(path, "is not a part of encoded prompts, or its beginning is damaged")
            )
        file = pq.ParquetFile(path, memory_map=True)
        meta = json.loads((file.schema_arrow.metadata or {}).get(b"g2rpo", b"null"))
        if not _is_meta(meta) or not {*COLUMNS, *_tensor_shapes(meta)} <= set(
            file.schema_arrow.names
        ):
            raise UserError(complaint(path, "is not a part of encoded prompts"))
        rows = file.read(columns=list(COLUMNS)).to_pylist()
        if not rows or not all(isinstance(value, str) for row in rows for value in row.values()):
            raise UserError(complaint(path, "holds no prompts, or some that are not text"))
        if file.num_row_groups != (1 if "online" in meta else -(-len(rows) // ROW_GROUP)):
            raise UserError(
                complaint(path, f"has {file.num_row_groups} row groups for {len(rows)} prompts")
            )
    return file, meta, [Prompt(row["id"], row["prompt"], row["style"]) for row in rows]


def _is_meta(meta: object) -> bool:
    shape = lambda value: (
        isinstance(value, list)
        and bool(value)
        and all(type(size) is int and size > 0 for size in value)
    )
    if not isinstance(meta, dict) or type(meta.get("prompts")) is not int:
        return False
    tensors = [value for key, value in meta.items() if key not in ("dtype", "online", "prompts")]
    length = meta.get("online")
    if length is not None:
        return (
            meta.get("dtype") in DTYPES
            and not tensors
            and type(length) is int
            and 0 < length <= LONGEST
        )
    return meta.get("dtype") in DTYPES and bool(tensors) and all(map(shape, tensors))
