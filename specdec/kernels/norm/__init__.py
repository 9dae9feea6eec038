"""RMS normalisation, plain and gated."""
