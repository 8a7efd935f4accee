"""Studies: matrices of runs with a report of their own, each a folder with a params.yaml.

`python -m studies` runs and makes them.
"""

import gc
import sys

if sys.argv[0] == "-m":
    gc.disable()  # while the command's modules are imported, see stages/start.py
