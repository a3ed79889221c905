"""The server: the one process that decides, and the only Ray driver. REST on a Unix socket, a token for everything.

`daemon` starts, finds and stops it and is what clients import; FastAPI is imported in the server's process only.
"""
