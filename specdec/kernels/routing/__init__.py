"""Expert routing in Triton; the reference and CPU implementations are in `moe`."""
