"""``python -m nvfp4viz``, and the installed command.

Ctrl-C is heeded from the first line on.  An interrupt inside an import leaves modules half made and prints where it
was, or is lost; so while modules load it is only noted, and heeded as soon as they are there.
"""

import io
import signal
import sys


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        if pressed:
            # Pressed twice: whatever keeps the modules from loading, nothing has begun that could be left half done.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        pressed = True

    def loaded() -> None:
        if watched:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt

    # A shell starts background jobs with Ctrl-C ignored, and so it stays.
    watched = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if watched:
        signal.signal(signal.SIGINT, note)
    from nvfp4viz.cli import main as run

    # A terminal of another encoding shows what it has no sign for as an escape.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run(loaded=loaded)
    if watched:
        # The report is out; what is left is to take the interpreter down.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
