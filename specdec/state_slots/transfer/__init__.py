"""Plan what an engine reads of another's memory: cut.py what a rank has of a model, plan.py what to copy."""
