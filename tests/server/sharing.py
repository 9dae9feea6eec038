"""`specdec` with one tenant for all, whatever keys and salts say: `python -m tests.server.sharing serve …`.

A mutant, so that attacks on what is kept apart are seen to succeed where it is not.
"""

import sys
from typing import Any

from aiohttp import web

from specdec.cli import main
from specdec.config.tenant import SOLE, Tenant
from specdec.engine import engine
from specdec.server.access import Access


def share() -> None:
    """Let whatever a request leaves serve everybody: keys are asked for, then all have the same name."""
    named: Any = engine
    named.Tenant = lambda caller, salt: Tenant(caller)
    admit = Access.admit

    def admit_as_one(access: Access, request: web.Request, *, needs_key: bool = True) -> str:
        admit(access, request, needs_key=needs_key)
        return SOLE.caller

    checked: Any = Access
    checked.admit = admit_as_one


if __name__ == "__main__":
    share()
    sys.exit(main())
