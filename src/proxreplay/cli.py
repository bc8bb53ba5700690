"""The command line: parse, call, print."""


def main() -> None:
    """Entry point of the ``proxreplay`` command."""
