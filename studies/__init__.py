"""Studies: matrices of runs with a report of their own, started by name; see study.yaml."""
