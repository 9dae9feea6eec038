"""Drafters, and the policies that choose a draft shape; independent of model family and sampling rules."""
