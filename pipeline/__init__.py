"""Runs the stages: DVC's graph, jobs on a cluster, the checks around them, and the rehearsal."""

import gc
import sys

if sys.argv[0] == "-m":
    gc.disable()  # while the command's modules are imported, see stages/start.py
