"""The stages of the pipeline: thin modules that read parameters, call g2rpo_core and write outputs.

No stage but `models` and `prompts` may reach for a hub, where the profile names one, so all of them start offline.
"""

import os
import signal
import sys

HUB_OFFLINE_BY_USER = os.environ.get("HF_HUB_OFFLINE")
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported
if (
    sys.argv[0] == "-m"
):  # `python -m stages.train` imports for seconds: Ctrl-C then ends it without a traceback (see `ends_in_one_line`)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
