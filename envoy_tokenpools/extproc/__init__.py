"""
The Envoy side: narrow wire messages, one exchange per HTTP request, and the gRPC service that drives it.
"""
