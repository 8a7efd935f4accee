"""The stages of the pipeline: thin modules that read parameters, call g2rpo_core and write outputs.

All of them start offline. `models`, `prompts` and `published` may access a hub if the settings name one: `allow_hub`.
"""

import os
import signal
import sys

_SET_BY_USER = os.environ.get("HF_HUB_OFFLINE")
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported
if (
    sys.argv[0] == "-m"
):  # `python -m stages.train` imports for seconds: Ctrl-C then ends it without a traceback (see `ends_in_one_line`)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def allow_hub() -> None:
    """Call it before huggingface_hub is imported. The user's own setting is kept: HF_HUB_OFFLINE=1 keeps a stage offline."""
    if _SET_BY_USER is None:
        os.environ["HF_HUB_OFFLINE"] = "0"
