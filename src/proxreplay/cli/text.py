"""Text that is safe on a terminal: names of other people are neither markup nor escape codes."""

import os
from typing import Any

from rich.console import Console


def terminal(*, stderr: bool = False) -> Console:
    """A console that takes text as it is: names of other people are no markup.

    Of processes that work together (torchrun), only the first one prints.
    """
    quiet = os.environ.get("RANK", "0") != "0"
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, quiet=quiet)


def plain(text: object) -> str:
    r"""Text for a terminal: control characters are shown, not obeyed.

    >>> plain("er" + chr(27) + "[31m")
    'er\\x1b[31m'
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def say(console: Console, text: object, **options: Any) -> None:
    """Print a line as it is, however long."""
    as_it_is: dict[str, Any] = dict.fromkeys(("markup", "highlight", "emoji"), False)
    console.print(plain(text), soft_wrap=True, **as_it_is, **options)
