"""The page of `g2rpo demo`: prompts drawn with the base and trained runs, and scored."""

import os
import tempfile

from g2rpo_core.foundation.errors import UserError

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported, as the next one
_HOME = os.environ.get("GRADIO_TEMP_DIR")
try:
    if _HOME:
        os.makedirs(_HOME, exist_ok=True)
    # Removed at this process's end
    _CACHE = tempfile.TemporaryDirectory(prefix="g2rpo-demo-", dir=_HOME)
except OSError as error:
    raise UserError(
        f"GRADIO_TEMP_DIR={_HOME}: cannot be written ({error.strerror}): name another folder"
    ) from None
os.environ["GRADIO_TEMP_DIR"] = _CACHE.name
