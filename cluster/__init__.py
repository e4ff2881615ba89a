"""The fleet: Ray controller, engines, gRPC router, OpenAI gateway, metrics and command line."""
