"""Forms of output: xgrammar compiles and follows them in processes of their own, which can be ended."""
