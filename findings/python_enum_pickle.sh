#!/usr/bin/env bash
# CPython 3.11.0 to 3.11.3 against all other releases: what a pickle of an enum's member says, for example in a checkpoint's index.
# One would expect: the same in every patch release of a minor one: the class and the member's value.
# These four write "getattr, the class, the member's name" instead. A reader that allows only known names (a restricted unpickler) has to
# allow builtins.getattr, or refuses files of a colleague's 3.11.2, which Debian 12 has; and a member that was renamed is found by its
# value in all other releases, and in files of these four by its old name alone.
# Seen: 3.11.2 -> builtins.getattr Kind BYTES; 3.10.13, 3.11.7, 3.12.1, 3.13.0 -> Kind b. PYTHON=/usr/bin/python3 chooses another.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv --without-pip "$work/venv"
"$work/venv/bin/python" - >"$work/seen" <<'PYTHON'
"""Print what a pickle of one member names, and whether a class whose member was renamed reads it."""
import enum, pickle, pickletools


class Kind(enum.Enum):
    BYTES = "b"


written = pickle.dumps(Kind.BYTES, protocol=4)
print(*(text for code, text, _ in pickletools.genops(written) if "UNICODE" in code.name and text != "__main__"))


class Kind(enum.Enum):
    RAW = "b"


try:
    print("renamed:", pickle.loads(written))
except AttributeError:
    print("renamed: AttributeError")
PYTHON
cat "$work/seen"
case $("$work/venv/bin/python" -c 'import platform; print(platform.python_version())') in
  3.11.[0-3]) diff "$work/seen" - <<'EXPECTED' ;;
builtins getattr Kind BYTES
renamed: AttributeError
EXPECTED
  *) diff "$work/seen" - <<'EXPECTED' ;;
Kind b
renamed: Kind.RAW
EXPECTED
esac
