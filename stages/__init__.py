"""The stages of the pipeline: each reads its parameters, calls g2rpo_core, writes its outputs.

All of them start offline. `models`, `prompts` and `published` may access a hub if the settings name
one: `allow_hub`.
"""

import os
import sys

from stages.start import before_imports

_SET_BY_USER = os.environ.get("HF_HUB_OFFLINE")
# huggingface_hub reads it at its import
os.environ["HF_HUB_OFFLINE"] = "1"
# `python -m stages.train` imports for seconds; `ends_in_one_line` is what ends it afterwards
if sys.argv[0] == "-m":
    before_imports()
    # before the stage imports torch
    if "--profile" in sys.argv[:-1]:
        from g2rpo_core.numerics.pins import pin_profile

        pin_profile(sys.argv[sys.argv.index("--profile") + 1])


def allow_hub() -> None:
    """Let this stage use the hub, unless the user has set HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants  # late, so that --help does not wait for it

    if (_SET_BY_USER or "0").upper() not in constants.ENV_VARS_TRUE_VALUES:
        os.environ["HF_HUB_OFFLINE"] = "0"
        # Not the variable: the library read that when it was imported, and looks at this
        constants.HF_HUB_OFFLINE = False
