"""
The books of the pools in Redis or Valkey, shared by any number of replicas.

`store.py` is the port's implementation; `calls.py` takes its operations to the server, several at a time; `wire.py` and
`script.py` know their form there, and `lua/` holds what is done with them; `connect.py` finds the server.
"""
