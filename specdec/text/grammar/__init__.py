"""Structured output: xgrammar compiles and follows grammars in separate processes, which can be killed."""
