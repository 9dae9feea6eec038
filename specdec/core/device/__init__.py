"""Steps that verify and accept drafts on the device, without a host round trip per step."""
