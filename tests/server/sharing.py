"""`specdec` with one tenant for all keys and salts: `python -m tests.server.sharing serve …`.

A mutant, which shows that the attacks succeed without isolation.
"""

import sys
from typing import Any

from aiohttp import web

from specdec.cli import main
from specdec.config.tenant import SOLE, Tenant
from specdec.engine import engine
from specdec.server.access import Access


def share() -> None:
    """Share everything between requests: keys are checked, but all get the same tenant."""
    named: Any = engine
    named._salted = lambda tenant, params: Tenant(tenant.caller)
    admit = Access.admit

    def admit_as_one(access: Access, request: web.Request, **needs: bool) -> Tenant:
        admit(access, request, **needs)
        return SOLE

    checked: Any = Access
    checked.admit = admit_as_one


if __name__ == "__main__":
    share()
    sys.exit(main())
