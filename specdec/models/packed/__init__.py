"""Folders of integers as they are published: GPTQ, AWQ and compressed-tensors, one file each."""
