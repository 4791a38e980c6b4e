"""
Where the books of the pools are kept: the port, and the stores behind it.
"""
