#!/usr/bin/env bash
# Pillow 12.3.0: the same picture as 16-bit PNG, stored as grey, as grey with alpha, and as RGB; each opened and `.convert("RGB")`.
# One would expect: the same pixels, since only the form of storage differs.
# Grey opens as I;16, whose conversion cuts at 255: all but the darkest 0.4 % is white. The other two open in 8 bits, by the upper byte.
# Seen, of 0, 255, 1000, 20000, 65535: grey -> 0, 255, 255, 255, 255; grey with alpha, RGB -> 0, 0, 3, 78, 255.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Write one row of 16-bit values as PNGs of three colour types, and read each as RGB."""
import io, struct, zlib
from PIL import Image

VALUES = [0, 255, 1000, 20000, 65535]
FORMS = {"grey": (0, lambda value: [value]), "grey with alpha": (4, lambda value: [value, 65535]), "RGB": (2, lambda value: [value] * 3)}


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


for form, (colour_type, samples) in FORMS.items():
    row = b"\0" + b"".join(struct.pack(">H", sample) for value in VALUES for sample in samples(value))
    header = struct.pack(">IIBBBBB", len(VALUES), 1, 16, colour_type, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    picture = Image.open(io.BytesIO(png))
    print(f"{form}: opens as {picture.mode}, in RGB", *picture.convert("RGB").tobytes()[::3])
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pillow==12.3.0
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
grey: opens as I;16, in RGB 0 255 255 255 255
grey with alpha: opens as RGBA, in RGB 0 0 3 78 255
RGB: opens as RGB, in RGB 0 0 3 78 255
EXPECTED
