"""The page itself, in Gradio: its inputs, what they ask of `answer`, the history, and the reports' pictures.

Nothing of it is fetched from elsewhere, and nothing is told to anybody: fonts are the system's, Gradio's analytics are off.
"""

import base64
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import gradio as gr
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from g2rpo_core.demo.answer import Asked, answer, checked, defaults, from_link, link, rewards_of
from g2rpo_core.errors import UserError
from g2rpo_core.inference.pictures import Painter
from g2rpo_core.inference.runs import kind_of, tiny_rewards
from g2rpo_core.rewards.registry import labels

KEPT = 30  # in the history
FIELDS = tuple(Asked.model_fields)
PAIRS = re.compile(r'<h2 id="(?:images|worst)">.*?</table></div>', re.DOTALL)  # of reporting/templates/report.html.j2
THEME = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
OPEN_TO_ALL = "Anybody who reaches this address can use the page: it asks for no password."

environment = Environment(loader=PackageLoader("g2rpo_core.demo"), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
environment.filters["b64"] = lambda data: base64.b64encode(data).decode()


def make_page(painter: Painter, profile: str, runs_of: Callable[[], list[str]], open_to_all: bool) -> gr.Blocks:
    """The page for a profile whose models `painter` keeps.

    runs_of: the runs that there are, asked whenever the page is loaded; open_to_all: say that others can reach it.
    """
    usual = defaults(painter.profile, runs_of())
    names = labels(painter.profile.rewards)
    any_lora = any(kind_of(Path("runs", profile, run)) == "lora" or kind_of(Path(run)) == "lora" for run in runs_of())

    def draw(saved: list[str], *values) -> tuple:
        """The message, the pictures, the history and its list, and the link of what was drawn."""
        try:
            asked = checked(_typed(dict(zip(FIELDS, values))))
            drawn = answer(painter, profile, runs_of(), asked)
        except Exception as error:
            return _message(_words(error)), gr.skip(), gr.skip(), gr.skip(), ""
        size = painter.profile.evaluation
        shown = {
            "drawn": drawn, "asked": asked, "link": link(asked), "labels": names, "pixelated": size.height < 128,
            "width": size.width, "height": size.height, "note": tiny_rewards(list(asked.rewards), painter.models),
        }  # fmt: skip
        kept = [link(asked), *(one for one in saved if one != link(asked))][:KEPT]
        return "", environment.get_template("pictures.html.j2").render(shown), kept, past_of(kept), link(asked)

    def past_of(saved: list[str]) -> str:
        """The list of what was drawn before; the browser keeps it, so what does not fit is left out."""
        past = []
        for one in saved if isinstance(saved, list) else []:
            try:
                past.append((asked := from_link(str(one), usual), link(asked)))
            except UserError:
                continue
        return environment.get_template("history.html.j2").render(past=past)

    def restore(saved: list[str], request: gr.Request) -> tuple:
        """The history, whether a link was followed, a message where it does not fit, and the inputs as the link has them."""
        runs, query = runs_of(), str(request.query_params)
        message, linked, values = "", False, dict(usual)
        if "prompt" in request.query_params:
            try:
                values, linked = from_link(query, usual).model_dump(), True
            except UserError as error:
                message = _message(str(error))
        choices = {"runs": [one for one in values["runs"] if one in runs], "rewards": values["rewards"]}
        shown = [gr.update(value=choices.get(name, values[name])) for name in FIELDS]
        shown[FIELDS.index("runs")] = gr.CheckboxGroup(choices=runs, value=choices["runs"])
        return past_of(saved), linked, message, *shown

    def draw_if_linked(linked: bool, *values) -> tuple:
        return draw(*values) if linked else (gr.skip(),) * 4 + ("",)

    with gr.Blocks(title=f"g2rpo demo: {profile}", analytics_enabled=False) as page:
        gr.HTML(_head(profile, open_to_all), elem_classes="g2-head")
        with gr.Tab("Draw"):
            with gr.Row():
                with gr.Column(scale=2, min_width=280):
                    prompt = gr.Textbox(label="Prompt", lines=2, placeholder=_example(painter), autofocus=True, elem_id="prompt")
                    press = gr.Button("Draw", variant="primary", elem_id="draw")
                    runs = gr.CheckboxGroup(runs_of(), value=usual["runs"], label="Trained runs, beside the base", elem_id="runs")
                    rewards = gr.CheckboxGroup(
                        [(names[name], name) for name in rewards_of(painter.profile)],
                        value=usual["rewards"], label="Scores by", elem_id="rewards",
                    )  # fmt: skip
                    seed = gr.Number(usual["seed"], label="Seed of the noise", precision=0, minimum=0, maximum=2**32 - 1, elem_id="seed")
                    with gr.Accordion("Sampling", open=True):
                        steps = gr.Slider(1, 100, usual["steps"], step=1, label="Steps", elem_id="steps")
                        guidance = gr.Slider(0, 20, usual["guidance"], step=0.1, label="Guidance", elem_id="guidance")
                        scale = gr.Slider(
                            0, 2, 1.0, step=0.05, label="LoRA scale", interactive=any_lora, elem_id="lora_scale",
                            info="strength of runs that are a LoRA" + ("" if any_lora else "; none of these is"),
                        )  # fmt: skip
                        share = gr.Slider(
                            0.05, 1, 1.0, step=0.05, label="Trained share", elem_id="trained_share",
                            info="of the steps, from the noisy end; the base does the others",
                        )  # fmt: skip
                with gr.Column(scale=5, min_width=280):
                    message = gr.HTML(elem_id="message")
                    pictures = gr.HTML(elem_id="pictures")
                    gr.Markdown("### History")
                    past = gr.HTML(past_of([]), elem_id="history")
        with gr.Tab("Pictures of the report") as tab:
            found = _reports()
            which = gr.Dropdown(list(found), value=next(iter(found), None), label="Report", visible=len(found) > 1)
            pairs = gr.HTML(elem_classes="g2-report", elem_id="pairs")
            show = lambda name: _pairs(found.get(name))
            tab.select(show, which, pairs, api_visibility="private")
            which.change(show, which, pairs, api_visibility="private")
        saved = gr.BrowserState([], storage_key=f"g2rpo-{profile}", secret="not-a-secret")
        address, linked = gr.State(""), gr.State(False)
        inputs = dict(zip(FIELDS, (prompt, seed, steps, guidance, scale, share, runs, rewards)))
        given = [saved, *inputs.values()]
        shown = [message, pictures, saved, past, address]
        alone = {"concurrency_limit": 1, "concurrency_id": "draw", "api_visibility": "private"}  # one picture at a time
        for event in (press.click, prompt.submit):
            event(draw, given, shown, show_progress_on=[pictures], **alone)
        page.load(restore, saved, [past, linked, message, *inputs.values()], api_visibility="private").then(
            draw_if_linked, [linked, *given], shown, show_progress_on=[pictures], **alone
        )
    return page


def _typed(values: dict) -> dict:
    """Gradio's numbers and lists as the types of `Asked`; what is empty stays so and is refused."""
    whole = lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
    kinds = {"seed": whole, "steps": whole, "runs": tuple, "rewards": tuple}
    number = lambda value: float(value) if isinstance(value, int) else value
    kinds |= dict.fromkeys(("guidance", "lora_scale", "trained_share"), number)
    return {name: kinds.get(name, lambda value: value)(value) for name, value in values.items()}


def _words(error: Exception) -> str:
    """One sentence for the page; what no user can cause goes to the console, too."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the device has too little memory for so many models: choose fewer runs or rewards, and start the demo again"
    traceback.print_exception(error)
    return f"this failed by a mistake in the program ({type(error).__name__}); the console of `g2rpo demo` says where"


def _message(text: str) -> str:
    return environment.from_string('<p class="g2-error" role="alert">{{ text }}</p>').render(text=text)


def _head(profile: str, open_to_all: bool) -> str:
    source = """<h1>G²RPO, profile {{ profile }}</h1>
<p class="g2-soft">One prompt and one noise, drawn by the model before training and by trained runs, and what the rewards say of each picture.</p>
{% if warning %}<p class="g2-warning">{{ warning }}</p>{% endif %}"""
    return environment.from_string(source).render(profile=profile, warning=OPEN_TO_ALL if open_to_all else "")


def _example(painter: Painter) -> str:
    return "a large red circle above a small blue square" if painter.profile.prompts.test == "shapes" else "what is to be drawn"


def _reports() -> dict[str, Path]:
    """The reports of this checkout by name: of params.yaml, and of the studies."""
    found = {"params.yaml": Path("reports", "report.html")}
    found |= {f"study {path.parts[1]}": path for path in sorted(Path("studies").glob("*/reports/report.html"))}
    return {name: path for name, path in found.items() if path.exists()}


def _pairs(report: Path | None) -> str:
    """The pictures of a report, each prompt by every method."""
    if report is None or not report.exists():
        return _message("there is no report here: `dvc repro` makes it")
    return "\n".join(PAIRS.findall(report.read_text(encoding="utf-8"))) or _message(f"{report} has no pictures")


def serve(page: gr.Blocks, host: str, port: int, browser: bool) -> str:
    """Starts the server in threads of this process; its address. UserError where it cannot listen there."""
    try:
        _, address, _ = page.queue(max_size=20).launch(
            server_name=host, server_port=port, inbrowser=browser, share=False, quiet=True, prevent_thread_lock=True, theme=THEME,
            css_paths=Path(__file__).parent / "templates" / "page.css", footer_links=[], run_history=False, enable_monitoring=False,
            mcp_server=False, ssr_mode=False, pwa=False, node_port=None,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"demo: cannot listen at {host}, port {port}: {_reason(error)}; give another --port") from None
    return address


def _reason(error: OSError) -> str:
    return error.strerror or "the port is taken"
