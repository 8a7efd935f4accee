"""`g2rpo demo`: a page on which one draws a prompt by the base and by trained runs, side by side, with their scores."""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
