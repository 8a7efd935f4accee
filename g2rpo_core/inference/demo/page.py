"""Build the page in Gradio: its inputs, its calls of `answer`, and the places of the `views`.

The page downloads nothing and reports nothing: it uses system fonts, and Gradio's analytics are
off.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.inference.demo import views
from g2rpo_core.inference.demo.answer import (
    KEPT,
    MANY,
    DrawnImage,
    ImageRequest,
    answer,
    checked,
    defaults,
    from_link,
    kept_links,
    link,
    list_rewards,
)
from g2rpo_core.inference.demo.requests import SmallRequests
from g2rpo_core.inference.demo.views import ALONE, HIDDEN
from g2rpo_core.inference.painter import Painter
from g2rpo_core.inference.pictures import MOST_STEPS
from g2rpo_core.inference.runs import find_weights, tiny_rewards
from g2rpo_core.rewards.addresses import names_of
from g2rpo_core.rewards.registry import labels
from g2rpo_core.tasks import TASK_NAMES
from g2rpo_core.tasks.table import TASKS
from g2rpo_core.weights.stored import weights_in

FIELDS = tuple(ImageRequest.model_fields)
THEME = gr.themes.Base(
    font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
).set(body_text_color_subdued="*neutral_500", body_text_color_subdued_dark="*neutral_400")
# The page's address brings its images back
REMEMBER = "link => { if (link) history.replaceState(null, '', link) }"


class Actions:
    """What the page does when a button is pressed or a link followed.

    list_runs: returns the existing runs, called whenever the page is loaded.
    """

    def __init__(self, painter: Painter, profile: str, list_runs: Callable[[], list[str]]):
        self.painter, self.profile, self.list_runs = painter, profile, list_runs
        self.usual = defaults(painter.profile, list_runs())
        self.labels = labels(painter.profile.rewards)

    def draw(self, saved: object, *values) -> tuple:
        """Return the message, the images, the history and its list, and the link of the images."""
        try:
            asked = checked(dict(zip(FIELDS, values)))
            drawn = answer(self.painter, self.profile, self.list_runs(), asked)
        except Exception as error:  # noqa: BLE001 - the page shows one sentence, whatever happened
            return views.failure(error), gr.skip(), gr.skip(), gr.skip(), ""
        kept = [link(asked), *(each for each in kept_links(saved) if each != link(asked))][:KEPT]
        return "", self._images(asked, drawn), kept, views.history(kept, self.usual), link(asked)

    def _images(self, asked: ImageRequest, drawn: Sequence[DrawnImage]) -> str:
        note = tiny_rewards(list(asked.rewards), self.painter.models)
        return views.images(asked, drawn, self.labels, self.painter.profile.evaluation, note)

    def example(self) -> str:
        """Return an example's images for the start; '' for models that take long to draw."""
        source = self.painter.profile.prompts.test
        if source not in TASK_NAMES:
            return ""
        asked = checked({**self.usual, "prompt": TASKS[source].example})
        return self._images(asked, answer(self.painter, self.profile, self.list_runs(), asked))

    def draw_if_linked(self, linked: bool, *values) -> tuple:
        """Draw as `draw` does if a link was followed; else leave the page as it is."""
        return self.draw(*values) if linked else (*[gr.skip()] * 4, "")

    def restore(self, saved: object, request: gr.Request) -> tuple:
        """Return the history, whether a link was followed, an error message, and the inputs.

        Without a link the inputs stay as they are: on a slow machine somebody may already have
        written into them.
        """
        message, linked, values = "", "prompt" in request.query_params, dict(self.usual)
        if linked:
            try:
                values = from_link(str(request.query_params), self.usual).model_dump()
            except UserError as error:
                message, linked = views.message(f"the link does not fit: {error}"), False
        runs = list(dict.fromkeys([*self.list_runs(), *values["runs"]]))
        given = {
            name: {"value": list(values[name]) if name in MANY else values[name]} if linked else {}
            for name in FIELDS
        }
        shown = {name: gr.update(**given[name]) for name in FIELDS}
        shown["runs"] = gr.CheckboxGroup(choices=runs, **given["runs"])
        return views.history(saved, self.usual), linked, message, *shown.values()


def make_page(
    painter: Painter,
    profile: str,
    list_runs: Callable[[], list[str]],
    open_to_all: bool,
) -> gr.Blocks:
    """Make the page of a profile.

    open_to_all: warn that others can reach it.
    """
    actions = Actions(painter, profile, list_runs)
    with gr.Blocks(title=f"g2rpo demo: {profile}", analytics_enabled=False) as page:
        gr.HTML(views.head(profile, open_to_all), elem_classes="g2-head", apply_default_css=False)
        # Inputs at the left, images and history at the right
        with gr.Tab("Draw"), gr.Row():
            with gr.Column(scale=2, min_width=280):
                inputs, press = _inputs(actions)
            with gr.Column(scale=5, min_width=280):
                message = gr.HTML(elem_id="message", apply_default_css=False)
                images = gr.HTML(actions.example(), elem_id="pictures", apply_default_css=False)
                gr.Markdown("### History")
                past = gr.HTML(
                    views.history([], actions.usual), elem_id="history", apply_default_css=False
                )
        _report_tab()
        # What the browser keeps: the history, and the link as the page's address
        saved = gr.BrowserState([], storage_key=f"g2rpo-{profile}", secret="not-a-secret")
        address, linked = gr.Textbox(visible=False), gr.State(False)
        # Draw when the button is pressed, and when a link is followed
        given, shown = [saved, *inputs.values()], [message, images, saved, past, address]
        for event in (press.click, inputs["prompt"].submit):
            event(
                actions.draw,
                given,
                shown,
                show_progress_on=[images],
                scroll_to_output=True,
                **ALONE,
            ).then(None, address, js=REMEMBER)
        page.load(actions.restore, saved, [past, linked, message, *inputs.values()], **HIDDEN).then(
            actions.draw_if_linked, [linked, *given], shown, show_progress_on=[images], **ALONE
        )
    return page


def _report_tab() -> None:
    """Add the tab with the images of the reports in this checkout."""
    with gr.Tab("The same prompts by all methods") as tab:
        files = views.reports()
        which = gr.Dropdown(
            list(files), value=next(iter(files), None), label="Methods of", visible=len(files) > 1
        )
        pairs = gr.HTML(elem_classes="g2-report", elem_id="pairs", apply_default_css=False)
        for event in (tab.select, which.change):
            event(lambda name: views.pairs(files.get(name)), which, pairs, **HIDDEN)


def _inputs(actions: Actions) -> tuple[dict, gr.Button]:
    """Make a component for each field of `ImageRequest`, in their order, and the button."""
    painter, usual, runs = actions.painter, actions.usual, actions.list_runs()
    any_lora = any(_is_lora(run, actions.profile) for run in runs)
    source = painter.profile.prompts.test
    example = TASKS[source].example if source in TASK_NAMES else "what to draw"
    made = {
        "prompt": gr.Textbox(
            label="Prompt",
            lines=2,
            max_lines=6,
            placeholder=f"such as: {example}",
            elem_id="prompt",
        )
    }
    press = gr.Button("Draw", variant="primary", elem_id="draw")
    made["runs"] = gr.CheckboxGroup(
        runs, value=list(usual["runs"]), label="Trained runs, next to the base", elem_id="runs"
    )
    offered = [(actions.labels[name], name) for name in list_rewards(painter.profile)]
    made["rewards"] = gr.CheckboxGroup(
        offered, value=list(usual["rewards"]), label="Scores by", elem_id="rewards"
    )
    whole = {"precision": 0, "minimum": 0, "maximum": 2**32 - 1}
    made["seed"] = gr.Number(usual["seed"], label="Seed of the noise", elem_id="seed", **whole)
    strength = "strength of LoRA runs" + ("" if any_lora else "; there are none here")
    sliders = {
        "steps": (1, MOST_STEPS, 1, "Steps", None),
        "lora_scale": (0, 2, 0.05, "LoRA scale", strength),
        "trained_share": (
            0.05,
            1,
            0.05,
            "Trained share",
            "share of the steps, from the noisy end, that the run does",
        ),
    }
    with gr.Accordion("Sampling", open=False):
        own = "empty: that which each run was trained with"
        made["guidance"] = gr.Number(
            usual["guidance"], label="Guidance", info=own, elem_id="guidance", minimum=0, maximum=20
        )
        for name, (low, high, step, label, info) in sliders.items():
            usable = None if any_lora or name != "lora_scale" else False
            made[name] = gr.Slider(
                low,
                high,
                usual[name],
                step=step,
                label=label,
                info=info,
                interactive=usable,
                elem_id=name,
            )
    return {name: made[name] for name in FIELDS}, press


def _is_lora(run: str, profile: str) -> bool:
    folder = find_weights(run, profile)
    return folder is not None and weights_in(folder)[1]


def serve(page: gr.Blocks, host: str, port: int, browser: bool) -> str:
    """Start the server in threads here and return its address; UserError if it cannot listen."""
    style = Path(__file__).parent / "templates" / "page.css"
    looks = {
        "theme": THEME,
        "css_paths": style,
        "footer_links": [],
        "inbrowser": browser,
        "quiet": True,
    }
    # The page takes no files; a page of another name that leads here is refused
    guard = {
        "max_file_size": 1,
        "app_kwargs": {
            "middleware": [
                Middleware(TrustedHostMiddleware, allowed_hosts=names_of(host)),
                Middleware(SmallRequests),
            ]
        },
    }
    without = dict.fromkeys(
        ("share", "run_history", "enable_monitoring", "mcp_server", "ssr_mode", "pwa"), False
    )
    try:
        _, address, _ = page.queue(max_size=20).launch(
            server_name=host,
            server_port=port,
            prevent_thread_lock=True,
            **looks,
            **guard,
            **without,
        )
    except OSError as error:
        raise UserError(
            f"demo: port {port} of {host} is not available ({error.strerror or 'it is taken'}): "
            "give another --port"
        ) from None
    return address
