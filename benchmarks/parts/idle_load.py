"""Holds connections to a server open until its input ends: `idle_load.py SOCKET PORT TOKEN JOB STREAMS IDLE`.

Half of the streams follow the change feed, half the log of JOB; the idle connections are on the TCP port and say
nothing. Prints `ready` once every stream has begun.
"""

import resource
import socket
import sys

HEAD = "GET {} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n\r\n"


def main() -> None:
    path, port, token, job, streams, idle = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    held = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(int(idle))]
    routes = ("/v1/changes/stream?after=0", f"/v1/jobs/{job}/logs/stream")
    for number in range(int(streams)):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(path)
        stream.sendall(HEAD.format(routes[number % 2], token).encode())
        if not stream.recv(4096).startswith(b"HTTP/1.1 200"):
            raise SystemExit("a stream was refused")
        held.append(stream)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    for connection in held:
        connection.close()


if __name__ == "__main__":
    main()
