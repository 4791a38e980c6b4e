"""
The policy: pure, synchronous, standard library only. Time and ids are arguments, quantities are integers.

Files climb one way: resources > pool > weight, bucket, cost, allocation > admission > account > judging > ledger, tick.
"""
