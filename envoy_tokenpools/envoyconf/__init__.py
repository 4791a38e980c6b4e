"""
Envoy configuration, built from the typed messages of envoy-data-plane, and the Envoy child process.

Files climb one way: options > filter > cluster, local_reply > listener > bootstrap, istio > ready_made.
`render` writes messages as YAML; `locate`, `admin_client` > `child` run an Envoy.
"""
