"""Sequence memory: every byte that a sequence needs between steps.

An arena is cut into equal slabs, with slab 0 reserved, and a slab serves one class until it is empty:

    bytes  [ 0 dummy )[ 1 state )[ 2 KV blocks: b b b . b . )[ 3 free )[ 4 records: r r . . . )
    slots             [ recurrent state, conv window )       [ update, decay, input )

layout.py computes the bytes of each slot and the offsets of its parts, views.py gives the kernels the same
bytes as tensors, slots.py allocates slots, integrity.py proves that nothing is owned twice or lost, and
arena.py is the interface to them. tree.py and window.py describe the input of a step.

In prefix/, cache.py is the prefix cache that requests use and tiers.py one memory of it with its eviction. In
transfer/, plan.py determines which bytes an engine reads of another's arena, for any numbers of ranks.
"""
