"""Replays of request traces against engines, routers and gateways."""
