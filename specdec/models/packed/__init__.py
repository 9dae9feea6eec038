"""Published integer formats: GPTQ, AWQ and compressed-tensors, one file each."""
