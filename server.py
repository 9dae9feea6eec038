"""Serve a model straight from a clone: `python server.py MODEL …` is `specdec serve MODEL …`."""

import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if missing := [name for name in ("torch", "aiohttp", "pydantic", "safetensors") if not find_spec(name)]:
        sys.exit(
            f"server.py: {', '.join(missing)} not found by {sys.executable}; "
            "`make serve` sets all up, .venv/bin/python server.py MODEL then serves any model."
        )
    from specdec.__main__ import main

    sys.argv.insert(1, "serve")
    main()
