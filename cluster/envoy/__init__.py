"""Envoy as the router's data plane: it carries the bytes, our picker decides where they go."""
