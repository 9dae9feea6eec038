"""`specdec` that accepts every lease for any prompt: `python -m tests.server.reach.gullible serve …`.

Neither side checks a request's claims about a lease: the mutant that the forgery tests must detect.
"""

import sys

from specdec.cli import main
from specdec.reach.lease import TransferLease
from specdec.reach.protocol import Secret


def believe(*_: object) -> bool:
    return True


if __name__ == "__main__":
    Secret.verifies = believe  # type: ignore[method-assign]
    TransferLease.check = believe  # type: ignore[method-assign, assignment]
    sys.exit(main())
