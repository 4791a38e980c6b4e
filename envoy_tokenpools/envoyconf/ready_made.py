"""
The ready-made configurations of the folder `envoy/`, each built by the code that builds all others.
"""

from pathlib import Path

from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.istio import IstioGateway, istio_envoy_filter
from envoy_tokenpools.envoyconf.options import EnvoyOptions, FilterOptions
from envoy_tokenpools.envoyconf.render import render_yaml, to_plain

_PORTABLE_HEADER = """\
Envoy in front of an OpenAI-compatible backend on 127.0.0.1:8000, with the filter
(envoy-tokenpools serve) on 127.0.0.1:50051. Clients connect to port 8080.

Needs Envoy 1.38 or later; 1.36 takes it without allow_content_length_header.
Generated: "envoy-tokenpools envoy-config" prints the same for other addresses and limits.
"""

_ISTIO_HEADER = """\
The filter in an Istio ingress gateway, for the service "tokenpools" in the namespace "tokenpools".

Needs a gateway with Envoy 1.36 or later. The filter's pods must accept plain gRPC from the gateway:
give them no sidecar, or a PeerAuthentication that permits it. Make the service headless
(clusterIP: None), so that every replica is used and one that is lost is dropped.
Uploads larger than the buffer limit below belong on a route of their own, where ExtProcPerRoute sets
request_body_mode NONE: until the filter has answered, the gateway buffers.
Generated: "envoy-tokenpools envoy-config --format istio" prints the same for other names and limits.
"""


def ready_made() -> dict[str, str]:
    """File name to text."""
    portable = EnvoyOptions(backend_url="http://127.0.0.1:8000")
    in_mesh = FilterOptions(
        ext_proc_host="tokenpools.tokenpools.svc.cluster.local",
        # Gateways are updated more slowly than an Envoy of one's own.
        keep_content_length=False,
    )
    gateway = IstioGateway(labels={"istio": "ingressgateway"})
    return {
        "portable.yaml": render_yaml(to_plain(build_bootstrap(portable)), _PORTABLE_HEADER),
        "istio-envoyfilter.yaml": render_yaml(istio_envoy_filter(in_mesh, gateway), _ISTIO_HEADER),
    }


def write_ready_made(folder: Path) -> None:
    """Write every ready-made configuration into `folder`."""
    for name, text in ready_made().items():
        (folder / name).write_text(text, "utf-8")
