"""What may come in from outside: limits that are looked at before the work that they bound.

An image is a few bytes and may become gigabytes; a JSON text is a few bytes a value, and Python
takes some hundred for each.
"""

OPEN = 2**26  # pixels of the images that are open at a time; one with more is refused
# Times that a side may have the other's pixels. Processors scale the shorter side to their own
# size, and the longer with it: 100 of 224 x 224 are 15 MB, 200,000 of them would be 30 GB
LONGEST_SIDE = 100
LONGEST_TEXT = 1000  # characters of a reason or a note of a server that are kept
MOST_LETTERS = 4000  # of a prompt; a tokenizer's time grows with the square of a word's length


def problem_of_image(width: int, height: int) -> str | None:
    """Say why no reward takes an image of so many pixels; None if each may."""
    if min(width, height) < 1:
        return f"has {width} x {height} pixels"
    if width * height > OPEN:
        return f"has {width * height / 1e6:.0f} megapixels, more than {OPEN / 1e6:.0f}"
    if max(width, height) > LONGEST_SIDE * min(width, height):
        return (
            f"has {width} x {height} pixels, one side over {LONGEST_SIDE} times the other: crop it"
        )
    return None




def has_few_values(data: bytes | bytearray, most: int) -> bool:
    """Say whether a JSON text has at most `most` values, without parsing it.

    Each value but the first has a comma, a bracket or a brace outside texts. Counting them takes
    a tenth of a second for 100 MiB, and no memory but copies of the text.
    """
    # What is escaped ends no text
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    if bare.count(b'"') > 4 * most:
        return False
    outside = b"".join(bare.split(b'"')[::2])
    return sum(map(outside.count, (b",", b"[", b"{"))) < most


def cut(text: object) -> str:
    """Return a text from outside, at most LONGEST_TEXT characters of it."""
    whole = str(text)
    return whole if len(whole) <= LONGEST_TEXT else f"{whole[:LONGEST_TEXT]}…"
