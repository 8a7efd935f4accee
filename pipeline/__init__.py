"""Runs the stages: DVC's graph, jobs on a cluster, the checks around them, and the rehearsal."""
