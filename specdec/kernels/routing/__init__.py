"""How Triton chooses experts; reference and CPU forms stand with the experts in `moe`."""
