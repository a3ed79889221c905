"""The server: the only process that takes decisions, and the only Ray driver. REST on a Unix socket, behind a token.

`orchestrator.home.daemon` starts, finds and stops it for clients; FastAPI is imported only in the server's process.
"""
