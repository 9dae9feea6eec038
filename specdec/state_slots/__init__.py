"""Own every byte that a sequence needs between steps.

An arena is cut into equal slabs, slab 0 apart, and a slab serves one class until it is empty:

    bytes  [ 0 dummy )[ 1 state )[ 2 KV blocks: b b b . b . )[ 3 free )[ 4 records: r r . . . )
    slots             [ conv window, recurrent state )       [ key, update, decay, input )

layout.py says how many bytes each slot has and where its parts lie, views.py shows the same bytes to the
kernels as tensors, slots.py hands slots out, integrity.py proves that nothing is owned twice or lost, and
arena.py is the door to them. tree.py and window.py describe what enters the network in a step.
"""
