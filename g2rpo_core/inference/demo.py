"""The page of `g2rpo demo`: one prompt by the base and trained runs, side by side, with scores."""

from collections.abc import Sequence

import gradio as gr
import pandas as pd
from PIL.Image import Image

from g2rpo_core.data.prompts import given_prompts
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.runs import drawn_as, find_weights, tiny_rewards
from g2rpo_core.rewards.preprocess import pil_images
from g2rpo_core.rewards.registry import REWARDS, labels, load
from g2rpo_core.rewards.scoring import score_table
from g2rpo_core.rewards.spec import Reward


class Demo:
    """Draws and scores what the page asks for; the models are loaded before it appears."""

    def __init__(self, painter: Painter, profile: str):
        self.painter, self.profile = painter, profile
        self.settings = painter.profile
        self.rewards: dict[str, Reward] = load(
            self.settings.training.rewards, painter.models, painter.device, self.settings.rewards
        )
        painter.policy(None)
        painter.encoders  # noqa: B018 - loads them

    def draw(
        self, prompt: str, runs: Sequence[str], seed: int
    ) -> tuple[list[tuple[Image, str]], pd.DataFrame]:
        """Return each run's picture with its name, as `g2rpo generate` draws it, and the scores.

        UserError for a prompt that the text encoders or a reward do not take.
        """
        (asked,) = given_prompts([prompt])
        for name in REWARDS.keys() & self.rewards.keys():
            if problem := REWARDS[name].problem_of_prompt(asked.text):
                raise UserError(f"{name}: {problem}")
        (conditioning,) = self.painter.encode([asked])
        named = labels(self.settings.rewards)
        pictures, rows = [], []
        for run, (weights, how) in drawn_as(runs, self.profile, self.settings).items():
            folder = find_weights(weights, self.profile)
            images = self.painter.draw(
                folder, conditioning, [seed], self.settings.evaluation.steps[0], how
            )
            pictures.append((pil_images(images)[0], run))
            found = score_table(self.rewards, [asked], images.to(self.painter.device))
            scores = found.score.round(4).astype(object).fillna(found.reason)
            rows.append({"run": run, **dict(zip(map(named.get, found.reward), scores))})
        return pictures, pd.DataFrame(rows)


def make_page(demo: Demo, runs: Sequence[str]) -> gr.Blocks:
    """Make the page; runs: those that it offers, of which the first two are ticked."""

    def draw(prompt: str, runs: list[str], seed: float | None) -> tuple:
        try:
            return demo.draw(prompt, runs, int(seed or 0))
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from None

    title = f"g2rpo demo: {demo.profile}"
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(f"# {title}")
        prompt = gr.Textbox(label="Prompt")
        ticked = gr.CheckboxGroup(list(runs), value=list(runs[:2]), label="Runs")
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1)
        press = gr.Button("Draw", variant="primary")
        pictures = gr.Gallery(label="One prompt, one noise", format="png", columns=4)
        note = tiny_rewards(list(demo.rewards), demo.painter.models)
        scores = gr.Dataframe(label=f"Scores ({note})" if note else "Scores")
        events = [press.click, prompt.submit]
        gr.on(events, draw, [prompt, ticked, seed], [pictures, scores], api_name="draw")
    return page
