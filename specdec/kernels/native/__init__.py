"""C kernels for narrow windows on a CPU: the operations between the matrix products, one call each.

A decode step of a small model is a thousand calls of one or two microseconds. The machine's C compiler builds
these once; they do the same arithmetic in a tenth of the calls. Without a compiler, plain torch runs.
"""
