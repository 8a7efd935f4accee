"""Serve the page of `g2rpo demo`: a prompt drawn with the base and with trained runs, scored, and voted on."""

import os
import tempfile

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported, as the next one
_CACHE = tempfile.TemporaryDirectory(
    prefix="g2rpo-demo-", dir=os.environ.get("GRADIO_TEMP_DIR")
)  # removed at this process's end
os.environ["GRADIO_TEMP_DIR"] = _CACHE.name
