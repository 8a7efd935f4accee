#!/usr/bin/env bash
# pandas 3.1.1 with pyarrow 26.0.1: the labels of rows (the index) after a Parquet file was filtered or sorted while reading.
# One would expect: each row keeps its label, as it does for `frame[frame.x > 2]` and `frame.sort_values("x")`.
# The default index is not a column of the file but a remark, "from 0 to 4 by 1". Where the number of rows still fits, the remark is
# laid over them in their new order, so that labels name other rows; where not, rows are counted anew. Written integers stay with them.
# Seen, of x = 1 5 2 7: filtered -> 1 3 in pandas, 0 1 read; sorted -> 3 1 2 0 in pandas, 0 1 2 3 read; written integers as pandas.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Filter and sort a frame in pandas and on the way from the file, with the default index and with the same integers written out."""
import sys
import pandas
import pyarrow.parquet

for name, index in {"default index": None, "written integers": [0, 1, 2, 3]}.items():
    frame = pandas.DataFrame({"x": [1, 5, 2, 7]}, index=index)
    frame.to_parquet(sys.argv[1])
    assert pandas.read_parquet(sys.argv[1]).equals(frame)
    filtered = pandas.read_parquet(sys.argv[1], filters=[("x", ">", 2)])
    ordered = pyarrow.parquet.read_table(sys.argv[1]).sort_by([("x", "descending")]).to_pandas()
    assert list(ordered.x) == list(frame.sort_values("x", ascending=False).x)
    print(f"{name}, filtered: in pandas", *frame[frame.x > 2].index, "| read", *filtered.index)
    print(f"{name}, sorted: in pandas", *frame.sort_values("x", ascending=False).index, "| read", *ordered.index)
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pandas==3.1.1 pyarrow==26.0.1
"$work/venv/bin/python" "$work/look.py" "$work/table.parquet" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
default index, filtered: in pandas 1 3 | read 0 1
default index, sorted: in pandas 3 1 2 0 | read 0 1 2 3
written integers, filtered: in pandas 1 3 | read 1 3
written integers, sorted: in pandas 3 1 2 0 | read 3 1 2 0
EXPECTED
