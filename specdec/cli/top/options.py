"""The options of `specdec top`."""

from specdec.config.base import Settings
from specdec.config.fields import positive, switch, text


class TopOptions(Settings):
    """Options of `specdec top`."""

    url: str = text("http://127.0.0.1:8000", "a specdec server, as a URL, HOST[:PORT] or PORT")
    model: str | None = text(None, "of several models the one to show; default: one that is warm")
    interval: float = positive(1.0, "between two polls")
    once: bool = switch(False, "print one picture, of two polls, and end")
    api_key: str | None = text(None, "the key; other users of the machine can read it there")
    api_key_env: str | None = text(None, "the environment variable that holds the key")
