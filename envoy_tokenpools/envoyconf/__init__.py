"""
Envoy configuration, built from the typed messages of envoy-data-plane, and the Envoy child process.

Files climb one way: options > listener, cluster, filter > bootstrap, istio > ready_made; render, child and
locate stand alone.
"""
