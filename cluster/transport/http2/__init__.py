"""gRPC over HTTP/2, written for many streams in lockstep: a client for links to engines, and a server for clients.

An engine sends one small message per stream in each step. All of them arrive in one read of the socket here and
are handed out in one pass, without a completion queue or a task per message.
"""
