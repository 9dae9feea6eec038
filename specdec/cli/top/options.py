"""The options of `specdec top`."""

from specdec.config.base import Settings
from specdec.config.fields import positive, switch, text


class TopOptions(Settings):
    """Options of `specdec top`."""

    url: str = text("http://127.0.0.1:8000", "a specdec server, as a URL, HOST[:PORT] or PORT")
    model: str | None = text(None, "one of several models; default: a warm one")
    interval: float = positive(1.0, "seconds between two polls")
    once: bool = switch(False, "print one snapshot, after two polls, and exit")
    api_key: str | None = text(None, "API key; other users of the machine can see it")
    api_key_env: str | None = text(None, "environment variable that holds the key")
