"""Trees as tensors: what hangs on what, the walk down, and which nodes a draft grows and keeps."""
