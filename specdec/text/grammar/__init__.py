"""Structured output: xgrammar compiles and applies grammars in separate processes, which can be killed."""
