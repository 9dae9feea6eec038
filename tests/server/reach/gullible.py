"""`specdec` that takes every lease for its own prompt's: `python -m tests.server.reach.gullible serve …`.

Neither side proves what a request says of a lease: what tests of forged ones must notice.
"""

import sys

from specdec.cli import main
from specdec.reach.lease import Lease
from specdec.reach.terms import Secret


def believe(*_: object) -> bool:
    return True


if __name__ == "__main__":
    Secret.verifies = believe  # type: ignore[method-assign]
    Lease.check = believe  # type: ignore[method-assign, assignment]
    sys.exit(main())
