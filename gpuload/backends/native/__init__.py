"""Native kernels of the CPU backend, compiled by numba. The home of numba.

Every function here runs without the GIL and without allocating, on arrays that its caller owns. `inflate` decodes
deflate streams, `chunks` reads and decodes stored chunks, `rows` gathers resident rows into minibatches.
"""
