"""`specdec route` in a separate process."""

import sys
import time

from tests.server.live import Live


class LiveRouter(Live):
    """A running `specdec route`, ended on exit from the context."""

    def __init__(self, *options: str, key: str = "") -> None:
        super().__init__(env={"SPECDEC_API_KEY": key})
        command = ("route", "--port", "0", "--check-period", "0.1", *options)
        self.command = [sys.executable, "-m", "specdec.cli", *command]

    def wait(self, replicas: int) -> None:
        """Wait until the given number of replicas is up."""
        for _ in range(600):
            answer = self.ask("/ready")
            if answer.status == (200 if replicas else 503) and answer.json.get("replicas", 0) == replicas:
                return
            time.sleep(0.05)
        raise AssertionError("".join(self.said))
