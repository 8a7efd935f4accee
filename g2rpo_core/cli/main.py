"""The command `g2rpo`: the tools around the pipeline.

Exit status: 0 success, 1 an error that one line on stderr explains, 2 wrong usage, 75 a temporary failure.
"""

import sys

import typer

from g2rpo_core.cli import (
    demo,
    doctor,
    export,
    fetch,
    generate,
    of_the_checkout,
    plan,
    probe,
    profile,
    report,
    score,
    serve_reward,
)
from g2rpo_core.errors import TRANSIENT_STATUS, TransientError, UserError

app = typer.Typer(
    name="g2rpo",
    help="Align flow text-to-image models by online RL: the tools around the pipeline. `dvc repro` runs the pipeline itself.",
    epilog="Exit status: 0 success, 1 an error that one line explains, 2 wrong usage, 75 a temporary failure: try again later.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)
app.command("doctor")(doctor.doctor)
app.add_typer(profile.app)
app.command("plan")(plan.plan)
for name, (module, about, example) in of_the_checkout.COMMANDS.items():
    app.command(name, help=f"{about}\n\nExample: g2rpo {name} {example}", context_settings=of_the_checkout.TAKES_ALL)(
        of_the_checkout.command(name, module)
    )
app.command("models")(fetch.models)
app.command("prompts")(fetch.prompts)
app.command("probe")(probe.probe)
app.command("generate")(generate.generate)
app.command("score")(score.score)
app.command("demo")(demo.demo)
app.command("serve-reward")(serve_reward.serve_reward)
app.command("export")(export.export)
app.command("report")(report.report)


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(TRANSIENT_STATUS if isinstance(error, TransientError) else 1)
