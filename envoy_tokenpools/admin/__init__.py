"""
The admin HTTP: metrics, health, the state of the pools as JSON, and a page to look at it.
"""
