"""Folders of whole numbers as they are published: GPTQ, AWQ and compressed-tensors, one file each."""
