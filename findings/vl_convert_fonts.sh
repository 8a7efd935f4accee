#!/usr/bin/env bash
# vl-convert-python 1.9.0.post1 (Altair's `save` to SVG and PNG), a chart that names no font; the package has fonts of its own.
# One would expect: the same SVG from the same chart everywhere, since texts are measured by the fonts inside the package.
# It adds the fonts that fontconfig finds on the machine, and measures "sans-serif" by one of them that is called Liberation Sans, Arial
# or Helvetica: labels and edges move, by a pixel where the two are nearly the same font, and committed charts differ by machine.
# Seen, with a made font of wide letters under these names -> the chart is wider; under another name, and without fonts -> equal bytes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/font.py" <<'PYTHON'
"""Make a font whose letters are all 1.5 em wide."""
import sys
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

family, path = sys.argv[1:]
letters = {code: f"letter{code}" for code in range(32, 127)}
pen = TTGlyphPen(None)
pen.moveTo((0, 0))
for corner in [(0, 700), (400, 700), (400, 0)]:
    pen.lineTo(corner)
pen.closePath()
box = pen.glyph()
font = FontBuilder(1000, isTTF=True)
font.setupGlyphOrder([".notdef", *letters.values()])
font.setupCharacterMap(letters)
font.setupGlyf({name: box for name in [".notdef", *letters.values()]})
font.setupHorizontalMetrics({name: (1500, 0) for name in [".notdef", *letters.values()]})
font.setupHorizontalHeader(ascent=800, descent=-200)
font.setupNameTable({"familyName": family, "styleName": "Regular", "fullName": family, "psName": family.replace(" ", "")})
font.setupOS2(sTypoAscender=800, sTypoDescender=-200, usWinAscent=800, usWinDescent=200)
font.setupPost()
font.save(path)
PYTHON
cat >"$work/chart.py" <<'PYTHON'
"""Print the SVG of a small chart."""
import vl_convert

rows = [{"method": "a label of some length", "score": 1}, {"method": "another", "score": 2}]
encoding = {"y": {"field": "method", "type": "nominal"}, "x": {"field": "score", "type": "quantitative"}}
print(vl_convert.vegalite_to_svg({"data": {"values": rows}, "mark": "bar", "encoding": encoding}, vl_version="6.1"))
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check vl-convert-python==1.9.0.post1 fonttools==4.68.0
mkdir "$work/fonts"
echo "<fontconfig><dir>$work/fonts</dir></fontconfig>" >"$work/fonts.conf"
export FONTCONFIG_FILE="$work/fonts.conf"
"$work/venv/bin/python" "$work/chart.py" >"$work/without.svg"
width() { sed -E '1s/^<svg[^>]* width="([0-9]+)".*/\1/;q' "$1"; }
for family in "Liberation Sans" Arial Helvetica "Somebody's Sans"; do
  "$work/venv/bin/python" "$work/font.py" "$family" "$work/fonts/font.ttf"
  "$work/venv/bin/python" "$work/chart.py" >"$work/with.svg"
  found=other
  if cmp -s "$work/without.svg" "$work/with.svg"; then found="equal bytes"; fi
  if (($(width "$work/with.svg") > $(width "$work/without.svg"))); then found=wider; fi
  echo "$family installed: $found" | tee -a "$work/seen"
done
diff "$work/seen" - <<'EXPECTED'
Liberation Sans installed: wider
Arial installed: wider
Helvetica installed: wider
Somebody's Sans installed: equal bytes
EXPECTED
