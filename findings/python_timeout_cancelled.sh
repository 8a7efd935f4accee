#!/usr/bin/env bash
# CPython 3.11.2 against 3.11.7 and 3.12.1: `asyncio.timeout` in a task that was cancelled and is tidying up.
# One would expect: a TimeoutError whenever the time is over, as its documentation says.
# 3.11.2 looks whether the task was ever cancelled, so that a time limit on the tidying ends in CancelledError: `except TimeoutError`
# never runs, and what it was to say or do is lost. In the later ones only cancellations inside the block count.
# Seen: 3.11.2 -> CancelledError; 3.11.7, 3.12.1 -> TimeoutError. PYTHON=/usr/bin/python3 chooses another.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv --without-pip "$work/venv"
"$work/venv/bin/python" - >"$work/seen" <<'PYTHON'
"""Cancel a task whose tidying up takes longer than the time that it gives itself."""
import asyncio


async def work():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except (TimeoutError, asyncio.CancelledError) as ended:
            return type(ended).__name__


async def main():
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    print("tidying up ended by", await task)


asyncio.run(main())
PYTHON
cat "$work/seen"
case $("$work/venv/bin/python" -c 'import platform; print(platform.python_version())') in
  3.11.2) diff "$work/seen" - <<<"tidying up ended by CancelledError" ;;
  3.11.[013456]) echo "not known for this release" ;;
  *) diff "$work/seen" - <<<"tidying up ended by TimeoutError" ;;
esac
