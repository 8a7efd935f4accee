"""What may come in from outside: limits that are looked at before the work that they bound.

An image is a few bytes and may become gigabytes.
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
