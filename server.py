"""Serve a model straight from a clone: `python server.py MODEL …` is `specdec serve MODEL …`."""

import sys

from specdec.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    main()
