#!/usr/bin/env bash
# pandas 3.1.1 with pyarrow 26.0.1, `to_parquet(folder, partition_cols=["key"])` and `read_parquet(folder)`.
# One would expect: the same values come back, as from a single file, at most as a category; or writing refuses what cannot.
# Values become names of folders: integers come back as such, but so does the text "01", as 1; truth values and floats come back as
# text, where "false" is true; and what pandas wrote with one missing key, pandas cannot read.
# Seen: 1, 2 -> 1, 2; "01", "02" -> 1, 2; True, False -> "true", "false"; 0.5, 1.5 -> text; "a", None -> ArrowInvalid on reading.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Write and read frames with keys of several kinds, as one file and by partition."""
import sys
import pandas

for number, keys in enumerate([[1, 2], ["01", "02"], [True, False], [0.5, 1.5], ["a", None]]):
    frame = pandas.DataFrame({"key": keys, "row": [0, 1]})
    file, folder = f"{sys.argv[1]}/{number}.parquet", f"{sys.argv[1]}/{number}"
    frame.to_parquet(file)
    assert pandas.read_parquet(file).equals(frame)
    frame.to_parquet(folder, partition_cols=["key"])
    try:
        print(keys, "->", list(pandas.read_parquet(folder).sort_values("row").key))
    except Exception as error:
        print(keys, "->", type(error).__name__, error)
PYTHON
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pandas==3.1.1 pyarrow==26.0.1
"$work/venv/bin/python" "$work/look.py" "$work" | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
[1, 2] -> [1, 2]
['01', '02'] -> [1, 2]
[True, False] -> ['true', 'false']
[0.5, 1.5] -> ['0.5', '1.5']
['a', None] -> ArrowInvalid Cannot yet unify dictionaries with nulls
EXPECTED
