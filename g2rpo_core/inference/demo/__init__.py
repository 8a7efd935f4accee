"""Serve the page of `g2rpo demo`: a prompt drawn with the base and with trained runs, side by side, and scored."""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
