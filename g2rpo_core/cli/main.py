"""Run the command `g2rpo`: the tools around the pipeline.

Exit status: 0 success, 1 an error that one line on stderr explains, 2 wrong usage, 75 a temporary failure.
"""

import sys

import typer

from g2rpo_core.cli import checkout, inspection, plan, probe, rewards, runs, votes
from g2rpo_core.foundation.errors import TRANSIENT_STATUS, TransientError, UserError
from g2rpo_core.foundation.files import what_lacks
from g2rpo_core.foundation.texts import show_any_text, visible

app = typer.Typer(
    name="g2rpo",
    help="Align flow text-to-image models by online RL: the tools around the pipeline. `dvc repro` runs the pipeline itself.",
    epilog="`make help` lists the first things to try, with their commands. Exit status: 0 success, 1 an error that one line explains, 2 wrong usage, 75 a temporary failure: try again later.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)
app.command("doctor")(inspection.doctor)
app.add_typer(inspection.app)
app.command("plan")(plan.plan)
for name, (module, help_text, example) in checkout.COMMANDS.items():
    app.command(name, help=f"{help_text}\n\nExample: g2rpo {name} {example}", context_settings=checkout.ANY_ARGUMENTS)(
        checkout.make_command(name, module)
    )
app.command("models")(checkout.models)
app.command("prompts")(checkout.prompts)
app.command("probe")(probe.probe)
app.command("generate")(runs.generate)
app.command("score")(rewards.score)
app.command("demo")(runs.demo)
app.command("votes")(votes.votes)
app.command("serve-reward")(rewards.serve_reward)
app.command("export")(runs.export)
app.command("report")(checkout.report)


def main() -> None:
    """Run the command; a UserError, and what the machine lacks, becomes one line on stderr and an exit status."""
    show_any_text()
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(TRANSIENT_STATUS if isinstance(error, TransientError) else 1)
    except Exception as error:
        if (line := what_lacks(error)) is None:
            raise
        print(f"error: {visible(line)}", file=sys.stderr)
        sys.exit(1)
