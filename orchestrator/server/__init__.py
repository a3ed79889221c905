"""The server: the only process that takes decisions, and the only Ray driver. REST on a Unix socket, behind a token.

Clients import `daemon`, which starts, finds and stops it; FastAPI is imported only in the server's process.
"""
