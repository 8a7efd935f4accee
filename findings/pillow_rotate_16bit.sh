#!/usr/bin/env bash
# Pillow 12.3.0, `Image.rotate` and `Image.transform` with BILINEAR or BICUBIC on mode I;16, which 16-bit grey PNGs (depth maps) have.
# One would expect: interpolated values, as in mode F and as `Image.resize` does in I;16, or an error for a mode that is not supported.
# The bytes are interpolated one by one and overlap: a picture that is 1000 everywhere comes out as values below 256, without a word.
# Seen, of a flat 1000: resize -> 1000; rotate in F -> 1000; rotate in I;16 by NEAREST -> 1000, by BILINEAR and BICUBIC -> below 256.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Turn a flat picture by a few degrees, and look at the middle, which no border reaches."""
from PIL import Image

flat = Image.frombytes("I;16", (32, 32), (1000).to_bytes(2, "little") * 32 * 32)


def middle(picture):
    low, high = picture.crop((12, 12, 20, 20)).getextrema()
    return f"{low:.0f}" if low == high else "below 256" if high < 256 else f"{low:.0f} to {high:.0f}"


for filter in (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
    as_float = flat.convert("F").rotate(10, filter)
    print(f"{filter.name}: resize {middle(flat.resize((48, 48), filter))}, rotate in F {middle(as_float)}, in I;16 {middle(flat.rotate(10, filter))}")
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pillow==12.3.0
"$work/venv/bin/python" "$work/look.py" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
NEAREST: resize 1000, rotate in F 1000, in I;16 1000
BILINEAR: resize 1000, rotate in F 1000, in I;16 below 256
BICUBIC: resize 1000, rotate in F 1000, in I;16 below 256
EXPECTED
