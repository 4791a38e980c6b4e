"""
Bodies and streams of the OpenAI family of APIs, read and measured. Pure: no I/O, clock or logging.
"""
