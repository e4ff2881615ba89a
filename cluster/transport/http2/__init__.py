"""A gRPC client over HTTP/2 for links to engines, which we trust, written for many streams in lockstep.

An engine sends one small message per stream in each step. All of them arrive in one read of the socket here and
are handed out in one pass, without a completion queue or a task per message.
"""
