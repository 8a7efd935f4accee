"""What a process does around its imports, which take seconds: signals and garbage collection."""

import gc
import signal
import threading


def before_imports() -> None:
    """Let Ctrl-C end the process without a traceback, and look for no garbage.

    Imports leave none, and the search after every few hundred objects takes a quarter of their
    time.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()


def after_imports() -> None:
    """Raise KeyboardInterrupt at Ctrl-C and SIGTERM, and look for garbage again."""
    if not gc.isenabled():
        gc.freeze()  # what was imported stays to the end
        gc.enable()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
