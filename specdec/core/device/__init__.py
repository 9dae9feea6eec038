"""Steps that decide on the device what was accepted, one after another, while the host looks on."""
