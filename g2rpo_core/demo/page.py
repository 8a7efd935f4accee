"""The page itself, in Gradio: its inputs, its calls of `answer`, and the places of the `views`.

The page downloads nothing and reports nothing: it uses system fonts, and Gradio's analytics are off.
"""

import traceback
from collections.abc import Callable
from pathlib import Path

import gradio as gr
import torch

from g2rpo_core.demo import views
from g2rpo_core.demo.answer import Asked, answer, checked, defaults, from_link, link, rewards_of
from g2rpo_core.errors import UserError
from g2rpo_core.inference.pictures import Painter
from g2rpo_core.inference.runs import folder_of, kind_of, tiny_rewards
from g2rpo_core.rewards.registry import labels
from g2rpo_core.worlds.names import WORLD_NAMES
from g2rpo_core.worlds.table import WORLDS

KEPT = 30  # in the history
FIELDS = tuple(Asked.model_fields)
THEME = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]).set(
    body_text_color_subdued="*neutral_500", body_text_color_subdued_dark="*neutral_400"
)
HIDDEN = {"api_visibility": "private"}
ALONE = {**HIDDEN, "concurrency_limit": 1, "concurrency_id": "draw"}  # one picture at a time
REMEMBER = "link => { if (link) history.replaceState(null, '', link) }"  # the page's address brings its pictures back


def make_page(painter: Painter, profile: str, runs_of: Callable[[], list[str]], open_to_all: bool) -> gr.Blocks:
    """The page for a profile whose models `painter` keeps.

    runs_of: returns the existing runs, called whenever the page is loaded; open_to_all: warn that others can reach the page.
    """
    usual = defaults(painter.profile, runs_of())
    names = labels(painter.profile.rewards)

    def draw(saved: list[str], *values) -> tuple:
        """The message, the pictures, the history and its list, and the link of what was drawn."""
        try:
            asked = checked(dict(zip(FIELDS, values)))
            drawn = answer(painter, profile, runs_of(), asked)
        except Exception as error:  # noqa: BLE001 - the page shows one sentence, whatever happened
            return views.message(_words(error)), gr.skip(), gr.skip(), gr.skip(), ""
        note = tiny_rewards(list(asked.rewards), painter.models)
        kept = [link(asked), *(one for one in saved if one != link(asked))][:KEPT]
        pictures = views.pictures(asked, drawn, names, painter.profile.evaluation, note)
        return "", pictures, kept, views.history(kept, usual), link(asked)

    def draw_if_linked(linked: bool, *values) -> tuple:
        return draw(*values) if linked else (*[gr.skip()] * 4, "")

    def restore(saved: list[str], request: gr.Request) -> tuple:
        """The history, whether a link was followed, a message if it does not fit, and the inputs as the link sets them."""
        message, linked, values = "", "prompt" in request.query_params, dict(usual)
        if linked:
            try:
                values = from_link(str(request.query_params), usual).model_dump()
            except UserError as error:
                message, linked = views.message(f"the link does not fit: {error}"), False
        runs = list(dict.fromkeys([*runs_of(), *values["runs"]]))
        shown = {name: gr.update(value=values[name]) for name in FIELDS}
        shown["runs"] = gr.CheckboxGroup(choices=runs, value=list(values["runs"]))
        shown["rewards"] = gr.update(value=list(values["rewards"]))
        return views.history(saved, usual), linked, message, *shown.values()

    with gr.Blocks(title=f"g2rpo demo: {profile}", analytics_enabled=False) as page:
        gr.HTML(views.head(profile, open_to_all), elem_classes="g2-head", apply_default_css=False)
        with gr.Tab("Draw"), gr.Row():
            with gr.Column(scale=2, min_width=280):
                inputs, press = _inputs(painter, names, usual, runs_of(), any(_is_lora(run, profile) for run in runs_of()))
            with gr.Column(scale=5, min_width=280):
                message = gr.HTML(elem_id="message", apply_default_css=False)
                pictures = gr.HTML(elem_id="pictures", apply_default_css=False)
                gr.Markdown("### History")
                past = gr.HTML(views.history([], usual), elem_id="history", apply_default_css=False)
        with gr.Tab("Pictures of the report") as tab:
            found = views.reports()
            which = gr.Dropdown(list(found), value=next(iter(found), None), label="Report", visible=len(found) > 1)
            pairs = gr.HTML(elem_classes="g2-report", elem_id="pairs", apply_default_css=False)
            for event in (tab.select, which.change):
                event(lambda name: views.pairs(found.get(name)), which, pairs, **HIDDEN)
        saved = gr.BrowserState([], storage_key=f"g2rpo-{profile}", secret="not-a-secret")
        address, linked = gr.Textbox(visible=False), gr.State(False)
        given, shown = [saved, *inputs.values()], [message, pictures, saved, past, address]
        for event in (press.click, inputs["prompt"].submit):
            event(draw, given, shown, show_progress_on=[pictures], scroll_to_output=True, **ALONE).then(
                None, address, js=REMEMBER
            )
        page.load(restore, saved, [past, linked, message, *inputs.values()], **HIDDEN).then(
            draw_if_linked, [linked, *given], shown, show_progress_on=[pictures], **ALONE
        )
    return page


def _inputs(painter: Painter, names: dict[str, str], usual: dict, runs: list[str], any_lora: bool) -> tuple[dict, gr.Button]:
    """A component for each field of `Asked`, in their order, and the button."""
    source = painter.profile.prompts.test
    example = WORLDS[source].example if source in WORLD_NAMES else "what to draw"
    made = {"prompt": gr.Textbox(label="Prompt", lines=2, max_lines=6, placeholder=example, elem_id="prompt")}
    press = gr.Button("Draw", variant="primary", elem_id="draw")
    made["runs"] = gr.CheckboxGroup(runs, value=list(usual["runs"]), label="Trained runs, beside the base", elem_id="runs")
    offered = [(names[name], name) for name in rewards_of(painter.profile)]
    made["rewards"] = gr.CheckboxGroup(offered, value=list(usual["rewards"]), label="Scores by", elem_id="rewards")
    whole = {"precision": 0, "minimum": 0, "maximum": 2**32 - 1}
    made["seed"] = gr.Number(usual["seed"], label="Seed of the noise", elem_id="seed", **whole)
    of_lora = "strength of LoRA runs" + ("" if any_lora else "; there are none here")
    sliders = {
        "steps": (1, 100, 1, "Steps", None),
        "guidance": (0, 20, 0.1, "Guidance", None),
        "lora_scale": (0, 2, 0.05, "LoRA scale", of_lora),
        "trained_share": (
            0.05,
            1,
            0.05,
            "Trained share",
            "share of the steps, from the noisy end, by the run; the base does the rest",
        ),
    }
    with gr.Accordion("Sampling"):
        for name, (low, high, step, label, info) in sliders.items():
            usable = None if any_lora or name != "lora_scale" else False
            made[name] = gr.Slider(low, high, usual[name], step=step, label=label, info=info, interactive=usable, elem_id=name)
    return {name: made[name] for name in FIELDS}, press


def _is_lora(run: str, profile: str) -> bool:
    folder = folder_of(run, profile)
    return folder is not None and kind_of(folder) == "lora"


def _words(error: Exception) -> str:
    """One sentence for the page; an error that no user can cause also goes to the console."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the device has too little memory for so many models: choose fewer runs or rewards, and restart the demo"
    traceback.print_exception(error)
    return f"this failed because of a bug in the program ({type(error).__name__}); see the console of `g2rpo demo`"


def serve(page: gr.Blocks, host: str, port: int, browser: bool) -> str:
    """Starts the server in threads of this process and returns its address; UserError if it cannot listen there."""
    style = Path(__file__).parent / "templates" / "page.css"
    looks = {"theme": THEME, "css_paths": style, "footer_links": [], "inbrowser": browser, "quiet": True}
    without = dict.fromkeys(("share", "run_history", "enable_monitoring", "mcp_server", "ssr_mode", "pwa"), False)
    try:
        _, address, _ = page.queue(max_size=20).launch(
            server_name=host, server_port=port, prevent_thread_lock=True, **looks, **without
        )
    except OSError as error:
        raise UserError(
            f"demo: port {port} of {host} is not available ({error.strerror or 'it is taken'}): give another --port"
        ) from None
    return address
