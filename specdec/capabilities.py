"""What can be combined with what: one table, from which refusals take their words."""

from specdec.errors import ConfigError
from specdec.models import spec


def resolve_drafters(draft: str, network: spec.Network) -> tuple[str, ...]:
    """Say who drafts. `auto` asks the model's own head, where there is one, and looks text up."""
    has_head = bool(network.mtp)
    if draft == "none":
        return ()
    if draft == "auto":
        return ("mtp", "suffix") if has_head else ("suffix",)
    if draft == "mtp" and not has_head:
        raise ConfigError(
            "draft: 'mtp' needs the model's own multi-token head, and this checkpoint holds no mtp.* tensors;"
            " use draft='suffix' or 'auto'.",
            field="draft",
        )
    if draft == "eagle":
        raise ConfigError(
            "draft: 'eagle' is not supported yet; use 'auto', 'mtp' or 'suffix'.", field="draft"
        )
    return (draft,)
