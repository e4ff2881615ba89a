"""The gRPC router: chooses an engine for each request and relays it.

Start one with :func:`npufleet.cluster.router.server.serve_router`; choose engines with its handle's
``picker``.
"""
