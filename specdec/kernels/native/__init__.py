"""Narrow windows on a CPU: the operations between the matrix products in C, one call each.

A decode step of a small model is a thousand calls of a microsecond or two. Compiled once by the machine's
own C compiler, these do the same arithmetic in a tenth of the calls. Where there is none, plain torch runs.
"""
