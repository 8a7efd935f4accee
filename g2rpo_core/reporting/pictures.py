"""Pictures in the page: small ones as they are, large ones as thumbnails that link to the lossless file."""

import base64
import io
import os
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from g2rpo_core.files import reading, whole

LARGE = 512  # pixels; a picture of this size or more becomes a thumbnail
THUMBNAIL = 320
QUALITY = 80  # of WebP
AGAIN = "the stage `evaluate` makes it again"


@dataclass(frozen=True)
class Picture:
    """source: a data URI; link: from the page's folder to the file, None if the source is the file itself."""

    source: str
    link: str | None


def picture(file: Path, page: Path) -> Picture:
    """A PNG for a page in the folder `page`; UserError if it is missing or damaged."""
    with reading(whole(file, AGAIN), AGAIN):
        data = file.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            small = image.convert("RGB")
    if max(small.size) <= LARGE:
        return Picture(_uri("png", data), None)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=QUALITY)
    return Picture(_uri("webp", buffer.getvalue()), Path(os.path.relpath(file, page)).as_posix())


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
