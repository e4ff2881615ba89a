"""How router and gateway reach engines: one interface, our own HTTP/2 client or grpcio behind it."""
