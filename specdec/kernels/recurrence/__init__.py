"""The gated delta rule and Mamba-2 over chains and trees, with states and records in the arena."""
