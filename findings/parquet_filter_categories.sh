#!/usr/bin/env bash
# pandas 3.1.1 with pyarrow 26.0.1, `read_parquet(filters=...)` on an ordered category (low < medium < high).
# One would expect: the rows that the same comparison takes in pandas, since the column comes back as that ordered category.
# Parquet compares the texts: "> low" is what comes after "low" in the alphabet, so "high" is lost and nothing is said.
# Seen: category > "low" -> in pandas medium, high; as a filter medium. The column read is ordered low < medium < high by both.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Take the rows above `low`, in pandas and while reading."""
import sys
import pandas

values = pandas.Categorical(["low", "high", "medium"], categories=["low", "medium", "high"], ordered=True)
pandas.DataFrame({"quality": values}).to_parquet(sys.argv[1])
read = pandas.read_parquet(sys.argv[1])
filtered = pandas.read_parquet(sys.argv[1], filters=[("quality", ">", "low")])
for name, frame in {"in pandas": read[read.quality > "low"], "as a filter": filtered}.items():
    print(f"{name}:", *sorted(frame.quality), "of", " < ".join(frame.quality.cat.categories), f"(ordered: {frame.quality.cat.ordered})")
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pandas==3.1.1 pyarrow==26.0.1
"$work/venv/bin/python" "$work/look.py" "$work/table.parquet" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
in pandas: high medium of low < medium < high (ordered: True)
as a filter: medium of low < medium < high (ordered: True)
EXPECTED
