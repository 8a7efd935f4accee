"""Numbers that are traced once."""

from g2rpo_core.models import kept as module
from g2rpo_core.models.kept import kept


def test_what_is_kept_is_made_again_only_if_what_decides_it_changes(here, monkeypatch):
    made = []

    def ask(what: str, decides: object) -> int:
        return kept(what, decides, lambda: made.append((what, decides)) or {"number": len(made)})[
            "number"
        ]

    assert [
        ask("a", (1, "x")),
        ask("a", (1, "x")),
        ask("a", (2, "x")),
        ask("b", (1, "x")),
        ask("a", (1, "x")),
    ] == [1, 1, 2, 3, 1]
    # Other code or another version of a package
    monkeypatch.setattr(module, "_identity", lambda *packages: ("other",))
    assert ask("a", (1, "x")) == 4
    # A file that a crash cut off, and a folder that cannot be written
    for file in module.FOLDER.iterdir():
        file.write_text("{")
    assert ask("a", (1, "x")) == 5 and ask("a", (1, "x")) == 5
