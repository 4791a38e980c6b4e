"""
The laboratory: a simulated engine, a backend made of it, clients and tables that show who got what.

`demo`, experiments and benchmarks stand on it; nothing that serves production traffic imports it.
"""
