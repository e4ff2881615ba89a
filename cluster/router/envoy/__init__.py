"""Envoy as the router's data plane: its configuration, what it asks our picker, its process."""
