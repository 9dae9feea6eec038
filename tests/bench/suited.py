"""Small random models that llama.cpp can run, with or without its packages installed."""

SUITED = {
    "hidden_size": 64,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mtp_num_hidden_layers": 1,
}
"""Keys and values of one size, and rows of whole groups of 32."""
