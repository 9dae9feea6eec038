"""Structured output: llguidance compiles and applies grammars in separate processes, which can be killed."""
