"""``python -m nvfp4viz``, and the installed command.

Ctrl-C is heeded from the first line on.  An interrupt inside an import leaves modules half made and prints where it
was, or is lost; so while modules load it is only noted, and heeded as soon as they are there.
"""

# What `signal` is made of: its enumerations take 3 ms of those in which Python itself answers Ctrl-C, with a traceback.
import _signal as signal
import io
import sys

ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    pressed, ended = False, 0

    def end(number: int, _: object) -> None:
        nonlocal ended
        ended = number
        raise KeyboardInterrupt

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
        # A job's time is over, or its terminal is gone: half a copy must not be left then either.
        for number in ENDS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, end)
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
    return 128 + ended if ended else code


if __name__ == "__main__":
    sys.exit(main())
