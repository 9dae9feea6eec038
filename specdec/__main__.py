"""The entry of the command: light, so that Ctrl-C ends it without a traceback while the rest is imported."""

import sys

INTERRUPTED = 130


def main() -> int:
    """Import the command and run it."""
    try:
        from specdec import cli

        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
