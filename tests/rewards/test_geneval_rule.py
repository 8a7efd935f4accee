"""GenEval's prompts are read back from their text and judged as the published code does."""

import re
from itertools import permutations

import pytest

from g2rpo_core.rewards.geneval_rule import (
    COLORS,
    NUMBERS,
    RELATIONS,
    Asked,
    Found,
    Thing,
    fulfils,
    keep,
    overlap,
    parse,
    relations,
    share,
)

# As in GenEval's evaluation/object_names.txt
NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant,
stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra,
giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite,
baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork,
knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut,
cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse, tv
remote, computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock,
vase, scissors, teddy bear, hair drier, toothbrush
"""
CLASSES = " ".join(NAMES.split()).split(", ")


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def prompt_of(asked: Asked) -> str:
    """The prompt that GenEval's prompts/create_prompts.py writes."""
    first = asked.things[0]
    if first.count > 1:
        number = {value: word for word, value in NUMBERS.items()}[first.count]
        return f"a photo of {number} {plural(first.name)}"
    words = [
        article(f"{thing.color} {thing.name}" if thing.color else thing.name)
        for thing in asked.things
    ]
    return "a photo of " + f" {asked.relation or 'and'} ".join(words)


def all_asked():
    """Everything of the six kinds, with the colours of pairs in turn."""
    for name in CLASSES:
        yield Asked((Thing(name),))
        yield from (Asked((Thing(name, count),)) for count in NUMBERS.values())
        yield from (Asked((Thing(name, color=color),)) for color in COLORS)
    for index, (a, b) in enumerate(permutations(CLASSES, 2)):
        yield from (Asked((Thing(a), Thing(b)), relation) for relation in (None, *RELATIONS))
        colors = COLORS[index % 10], COLORS[(index + 1 + index // 10 % 9) % 10]
        yield Asked((Thing(a, color=colors[0]), Thing(b, color=colors[1])))


def test_the_parser_inverts_every_published_template():
    assert len(set(CLASSES)) == 80
    wrong = [asked for asked in all_asked() if parse(prompt_of(asked), CLASSES) != asked]
    assert wrong == []


@pytest.mark.parametrize(
    "prompt, problem",
    [
        ("a cat", "not a prompt of GenEval"),
        ("a photo of a cat and a cat", "it names 'cat' twice"),
        ("a photo of a red cat and a dog", "both objects have a colour, or none"),
        ("a photo of a unicorn", "the detector knows no 'unicorn'"),
    ],
)
def test_any_other_prompt_says_what_is_wrong(prompt, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse(prompt, CLASSES)


def found(*boxes, score: float = 0.95) -> list[Found]:
    return [Found(score - 0.01 * place, box) for place, box in enumerate(boxes)]


SQUARE = (0.0, 0.0, 10.0, 10.0)


def moved(x: float, y: float) -> tuple[float, float, float, float]:
    return (x, y, x + 10.0, y + 10.0)


@pytest.mark.parametrize(
    "threshold, most, scores", [(0.3, 16, [0.95, 0.5]), (0.9, 16, [0.95]), (0.0, 2, [0.95, 0.5])]
)
def test_what_counts_is_above_the_threshold_and_the_surest_first(threshold, most, scores):
    objects = [Found(score, SQUARE) for score in (0.3, 0.5, 0.95)]
    assert [one.score for one in keep(objects, threshold, most, 1.0)] == scores


def test_of_two_objects_that_overlap_the_surer_one_counts():
    a, b, c = found(SQUARE, moved(0, 2), moved(30, 0))
    assert overlap(SQUARE, SQUARE) == 1.0 and overlap(SQUARE, moved(11, 0)) == 0.0
    assert overlap(SQUARE, moved(0, 2)) == pytest.approx(
        99 / 143
    )  # 11 pixels a side: 9 x 11 of 2 x 121
    assert keep([a, b, c], 0.3, 16, 0.7) == [a, b, c]
    assert keep([a, b, c], 0.3, 16, 0.69) == [a, c]


@pytest.mark.parametrize(
    "box, held",
    [
        (moved(-20, 0), {"left of"}),
        (moved(0, -20), {"above"}),
        (moved(20, 20), {"right of", "below"}),  # 18 of a distance of 28.3 on each axis
        (moved(20, 10), {"right of"}),  # down: 8 of 22.4
        (moved(2, 0), set()),  # a margin of 0.1 of 10 + 10
        (moved(3.9, 0), set()),  # 1.9 beyond it, of 3.9
        (moved(4.1, 0), {"right of"}),
    ],
)
def test_a_position_needs_more_than_the_margin_and_half_the_distance(box, held):
    assert relations(box, SQUARE, 0.1) == held


CAT, RED, PAIR = "a photo of a cat", "a photo of a red cat", "a photo of a red cat and a blue dog"
CATS, LEFT = "a photo of three cats", "a photo of a cat left of a dog"
ONE, RIGHT = found(SQUARE), found(moved(30, 0))
TWO, FAR = found(SQUARE, moved(30, 0)), found(SQUARE, moved(60, 0))
BOTH = {"cat": ONE, "dog": ONE}


@pytest.mark.parametrize(
    "prompt, objects, colors, whole, part",
    [
        (CATS, {"cat": found(*[SQUARE] * 3)}, {}, True, 1.0),
        (CATS, {"cat": found(*[SQUARE] * 4)}, {}, False, 2 / 3),
        (CATS, {"cat": found(*[SQUARE] * 7)}, {}, False, -1 / 3),
        (CAT, {"cat": TWO}, {}, True, 0.0),  # GenEval takes the surest one
        (CAT, {"cat": []}, {}, False, 0.0),
        (RED, {"cat": ONE}, {"cat": ["red"]}, True, 1.0),
        (RED, {"cat": ONE}, {"cat": ["blue"]}, False, 0.5),
        (RED, {}, {}, False, 0.0),
        # Of two cats GenEval asks for the surest one's colour; for the share their number is wrong
        (RED, {"cat": TWO}, {"cat": ["red", "blue"]}, True, 0.0),
        (RED, {"cat": TWO}, {"cat": ["blue", "red"]}, False, 0.0),
        (PAIR, BOTH, {"cat": ["red"], "dog": ["blue"]}, True, 1.0),
        (PAIR, BOTH, {"cat": ["blue"], "dog": ["blue"]}, False, 0.75),
        (PAIR, {"dog": ONE}, {"dog": ["blue"]}, False, 0.5),
        (LEFT, {"cat": ONE, "dog": RIGHT}, {}, True, 1.0),
        (LEFT, {"cat": RIGHT, "dog": ONE}, {}, False, 2 / 3),
        (LEFT, {"cat": ONE}, {}, False, 1 / 3),
        # GenEval looks at the surest cat alone
        (LEFT, {"cat": FAR, "dog": RIGHT}, {}, True, 1 / 3),
        (LEFT, {"cat": FAR[::-1], "dog": RIGHT}, {}, False, 1 / 3),
    ],
)
def test_numbers_colours_and_positions_are_judged_as_published(
    prompt, objects, colors, whole, part
):
    """By both rules; colors: those of the objects of a class, the surest first."""
    color_of = lambda these, name: colors[name][: len(these)]
    arguments = (parse(prompt, CLASSES), objects, color_of, 0.1)
    assert (fulfils(*arguments), share(*arguments)) == (whole, pytest.approx(part))
