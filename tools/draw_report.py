"""Take the first screen of a report as a picture, by headless Chromium.

`python -m tools.draw_report` takes docs/report.png from reports/report.html, and with `words` takes
docs/words.png from the study `words_baselines`. The picture's metadata has the report's verdict.
"""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1200, 720
PAGES = {"report": "reports", "words": "studies/words_baselines/reports"}  # picture -> of a page


def main() -> None:
    """Take the picture."""
    name = sys.argv[1] if len(sys.argv) > 1 else "report"
    page, picture = ROOT / PAGES[name] / "report.html", ROOT / "docs" / f"{name}.png"
    pattern = r'<p class="verdict">(.*?)</p>'
    (verdict,) = re.findall(pattern, page.read_text(encoding="utf-8"), re.DOTALL)
    text = PngInfo()
    text.add_itxt("verdict", unescape(verdict).strip())
    with TemporaryDirectory() as folder:
        taken = Path(folder, "screen.png")
        flags = ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars")
        command = ["chromium", *(f"--{flag}" for flag in flags), f"--user-data-dir={folder}"]
        command += [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=5000"]
        command += [f"--screenshot={taken}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        Image.open(taken).convert("RGB").quantize(128).save(picture, pnginfo=text, optimize=True)
    print(picture)


if __name__ == "__main__":
    main()
