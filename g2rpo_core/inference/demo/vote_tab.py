"""Build the tab where a person votes on two images."""

import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import gradio as gr

from g2rpo_core.evaluation.settings import EvaluationSettings
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.runs import BASE
from g2rpo_core.inference.demo.views import ALONE, HIDDEN, VOTES_OF_ALL, environment, failure
from g2rpo_core.inference.demo.vote import Pair, draw_pair, offered_prompts
from g2rpo_core.inference.demo.vote import keep as keep_vote
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.votes import file_of
from g2rpo_core.rewards.votes import EQUAL

SKIP = "skip"
# Votes in a minute, of all who vote here together: more than people give who look at the images,
# fewer than a script would. Names and sessions are free, so no limit for each would hold
MOST_A_MINUTE = 30
# One press at a time, of whichever button and session
ONE_PRESS = {**HIDDEN, "concurrency_limit": 1, "concurrency_id": "vote"}
CHOICES = {
    "left": "Left is better",
    EQUAL: "Both are equal",
    "right": "Right is better",
    SKIP: "Skip",
}


class Actions:
    """Callbacks of the tab's buttons; list_runs: returns the base and the existing runs."""

    def __init__(self, painter: Painter, profile: str, list_runs: Callable[[], list[str]]):
        self.painter, self.profile, self.list_runs = painter, profile, list_runs
        self.times = deque[float](maxlen=MOST_A_MINUTE)  # of the last votes

    def next_pair(self, pair: Pair | None, prompts: object, runs: object) -> tuple:
        """Return the message, the images, the next pair and its id; skip if one has no vote."""
        if pair is not None:
            return (gr.skip(),) * 4
        try:
            pair = draw_pair(
                self.painter, self.profile, self.list_runs(), prompts, runs, random.SystemRandom()
            )
        except Exception as error:  # noqa: BLE001 - the page shows one sentence, whatever happened
            return failure(error), "", None, ""
        return gr.skip(), render_pair(pair, self.painter.profile.evaluation), pair, pair.id

    def keep(self, choice: str, pair: Pair | None, shown: str, voter: object) -> tuple:
        """Keep a choice; return which image was whose, and no pair.

        A choice for another pair than the one on the page does not count, nor a second one.
        """
        if pair is None or pair.id != shown:
            return gr.skip(), gr.skip()
        try:
            if choice != SKIP:
                if len(self.times) == MOST_A_MINUTE and time.monotonic() < self.times[0] + 60:
                    raise UserError(f"{MOST_A_MINUTE} votes within a minute: wait a little")
                keep_vote(file_of(self.profile), pair, choice, voter)
                self.times.append(time.monotonic())
        except Exception as error:  # noqa: BLE001 - the page shows one sentence, whatever happened
            return failure(error), gr.skip()
        return voted(pair, choice), None


def add(
    painter: Painter, profile: str, list_runs: Callable[[], list[str]], page: gr.Blocks
) -> None:
    """Add the tab where a person picks the better of two images; list_runs: the existing runs."""
    actions = Actions(painter, profile, lambda: [BASE[0], *list_runs()])
    with gr.Tab("Vote"), gr.Row():
        # Inputs at the left, the pair and what to say of it at the right
        with gr.Column(scale=2, min_width=280):
            prompts = gr.Textbox(
                offered_prompts(painter, profile),
                label="Prompts, one a line",
                lines=6,
                max_lines=12,
                elem_id="vote-prompts",
            )
            there = actions.list_runs()
            runs = gr.CheckboxGroup(
                there,
                value=there,
                label="Compare",
                info="of one alone, two seeds",
                elem_id="vote-runs",
            )
            voter = gr.Textbox(
                label="Your name",
                info="need not be given; it is kept with your votes",
                elem_id="voter",
            )
            gr.Markdown(VOTES_OF_ALL)
            start = gr.Button("Draw a pair", variant="primary", elem_id="vote-start")
        with gr.Column(scale=5, min_width=280):
            images = gr.HTML(elem_id="pair", apply_default_css=False)
            with gr.Row():
                buttons = {
                    choice: gr.Button(label, elem_id=f"vote-{choice}")
                    for choice, label in CHOICES.items()
                }
            message = gr.HTML(elem_id="voted", apply_default_css=False)
    # The pair stays with the server, so that the browser cannot tell whose the images are; `shown`
    # says which pair a press is about
    pair, shown = gr.State(None), gr.Textbox(visible=False)
    given, after = [pair, prompts, runs], [message, images, pair, shown]
    start.click(lambda: ("", None), None, [message, pair], **HIDDEN).then(
        actions.next_pair, given, after, show_progress_on=[images], **ALONE
    )
    for choice, button in buttons.items():
        button.click(
            partial(actions.keep, choice), [pair, shown, voter], [message, pair], **ONE_PRESS
        ).then(actions.next_pair, given, after, show_progress_on=[images], **ALONE)
    page.load(lambda: gr.CheckboxGroup(choices=actions.list_runs()), None, runs, **HIDDEN)


def render_pair(two: Pair, size: EvaluationSettings) -> str:
    """Render two images side by side, without a word of what drew them."""
    return environment.get_template("pair.html.j2").render(
        pair=two, width=size.width, height=size.height, pixelated=size.height < 128
    )


def voted(two: Pair, choice: str) -> str:
    """Render what was what, after the vote."""
    said = {
        "left": "you chose the left one",
        "right": "you chose the right one",
        "equal": "both are equal to you",
        "skip": "skipped",
    }
    text = (
        '<p class="g2-soft">The last pair: left {{ l.run }}, seed {{ l.seed }}; right {{ r.run }}, '
        "seed {{ r.seed }}: {{ said }}.</p>"
    )
    return environment.from_string(text).render(l=two.left, r=two.right, said=said[choice])
