"""Routing policies, one a file; ``router/registry.py`` knows them by name."""
