"""
The one use-case: identify, admit or shed, settle, and tick. Everything around it only carries bytes.
"""
