"""Write SVG as text with rounded numbers, so that every machine writes the same bytes."""

from dataclasses import dataclass, field
from html import escape

INK, GREY, PALE = "#222222", "#8a8a8a", "#d8d8d8"
BLUE, ORANGE, GREEN, PURPLE = "#2456a6", "#d9660a", "#1f7a4d", "#7a3b9c"
WIDTH = 760


@dataclass
class Figure:
    """An SVG, in pixels from the top left corner."""

    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        color: str = INK,
        width: float = 1.5,
        dash: str = "",
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        points = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {points} stroke="{color}" stroke-width="{width:g}"{dashed}/>')

    def circle(self, x: float, y: float, radius: float, fill: str, stroke: str = INK) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}" stroke="{stroke}"/>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = INK
    ) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} rx="2" fill="{fill}" stroke="{stroke}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: str = "start",
        color: str = INK,
        size: int = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}"'
        self.parts.append(f"<text {place}{weight}>{escape(words)}</text>")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = INK) -> None:
        """Draw an arrow straight down or to the right."""
        self.line(x1, y1, x2, y2, color)
        head = (
            ((x2 - 5, y2 - 8), (x2 + 5, y2 - 8))
            if x1 == x2
            else ((x2 - 8, y2 - 5), (x2 - 8, y2 + 5))
        )
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x2, y2), *head))
        self.parts.append(f'<polygon points="{points}" fill="{color}"/>')

    def svg(self) -> str:
        """Return the SVG file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}"'
        )
        style = ' font-family="system-ui, sans-serif" role="img"'
        paper = f'<rect width="{WIDTH}" height="{self.height}" fill="#ffffff"/>'
        return "\n".join(
            [
                f"{head}{style}>",
                f"<title>{escape(self.title)}</title>",
                paper,
                *self.parts,
                "</svg>\n",
            ]
        )
