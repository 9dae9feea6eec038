"""`python -m specdec.cli` is `python -m specdec`."""

from specdec.__main__ import main

if __name__ == "__main__":
    main()
