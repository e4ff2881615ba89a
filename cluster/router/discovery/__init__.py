"""Where a router alone finds its engines on Kubernetes: the EndpointSlices of services, watched."""
