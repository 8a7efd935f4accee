"""The stages of the pipeline: thin modules that read parameters, call g2rpo_core and write outputs.

No stage but `models` and `prompts` may reach for a hub, where the profile names one, so all of them start offline.
"""

import os

HUB_OFFLINE_BY_USER = os.environ.get("HF_HUB_OFFLINE")
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported
