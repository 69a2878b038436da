"""Options that would change nothing, or the source: refused before anything is read.

One that changes nothing is refused where whoever gives it would be misled about what was read or written.  A script may
give the same ``--seed``, ``--gpu`` or ``--paths`` to every fault and every format; their help says where they change
nothing.

What an option does beside the others is tested as a table of all commands and options (``tests/test_cli_options.py``).
"""

from __future__ import annotations

import argparse

from nvfp4viz.checkpoint.source import is_address
from nvfp4viz.cli_output import refuse_own_files
from nvfp4viz.errors import InputError


def is_hub(source: str) -> bool:
    """Is this a repository on the hub, which alone has revisions?

    >>> is_hub("hf://owner/name"), is_hub("https://huggingface.co/owner/name"), is_hub("https://example.org/m")
    (True, True, False)
    """
    if not is_address(source):
        return False
    from nvfp4viz.checkpoint.remote import HUB_PAGE

    return source.startswith("hf://") or HUB_PAGE.fullmatch(source) is not None


def refuse_idle(options: argparse.Namespace) -> None:
    """Check one command line.

    Raises
    ------
    InputError
        ``cli.empty``, ``cli.idle-revision``, ``cli.idle-suspects``, ``cli.output-weights``, ``cli.output-source``.
    """
    given = vars(options)
    for name, value in given.items():
        if value == "":
            plain = name in ("source", "out", "other", "tensor")
            raise InputError("cli.empty", option=name.upper() if plain else f"--{name.replace('_', '-')}")
    sources = [given[side] for side in ("source", "other") if side in given]
    revision = given.get("revision")
    if revision is not None and not any(map(is_hub, sources)):
        raise InputError("cli.idle-revision")
    if options.command == "repair" and options.suspects and options.policy == "weight-only":
        raise InputError("cli.idle-suspects")
    here = [source for source in sources if not is_address(source)]
    for option in ("output", "csv"):
        refuse_own_files(given.get(option), here)
