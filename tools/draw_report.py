"""Takes docs/report.png: the first screen of reports/report.html, by headless Chromium, with the report's verdict inside."""

import re
import subprocess
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1200, 645


def main() -> None:
    page, picture = ROOT / "reports" / "report.html", ROOT / "docs" / "report.png"
    (verdict,) = re.findall(
        r'<p class="verdict">(.*?)</p>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    with TemporaryDirectory() as folder:
        taken = Path(folder, "screen.png")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}",
        ]
        command = [
            "chromium",
            *flags,
            f"--window-size={WIDTH},{HEIGHT}",
            "--virtual-time-budget=5000",
            f"--screenshot={taken}",
        ]
        subprocess.run([*command, page.as_uri()], check=True, capture_output=True)
        text = PngInfo()
        text.add_itxt("verdict", unescape(verdict).strip())
        Image.open(taken).convert("RGB").quantize(128).save(picture, pnginfo=text, optimize=True)
    print(picture)


if __name__ == "__main__":
    main()
