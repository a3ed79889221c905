"""Submits jobs over CLIENTS connections for SECONDS: `submit_load.py SOCKET TOKEN CLIENTS SECONDS [JOBS]`.

With JOBS each call submits so many (POST /v1/jobs/bulk). Prints JSON: the seconds of each call, how long all took,
the processor time of this process, and the first error.
"""

import asyncio
import json
import secrets
import sys
import time
from typing import Any

HEAD = (
    "POST {} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n"
    "Idempotency-Key: {}\r\nContent-Length: {}\r\n\r\n"
)


def spec(number: int) -> dict[str, Any]:
    command = f"python train.py --learning-rate {number / 1e6}"
    return {"name": f"sweep-{number % 50}", "command": command, "env": {"TRIAL": str(number)}, "priority": -5}


class Load:
    def __init__(self, socket: str, token: str, seconds: float, jobs: int):
        self.socket, self.token, self.jobs = socket, token, jobs
        self.end_s = time.perf_counter() + seconds
        self.samples_s: list[float] = []
        self.error = ""

    def request(self) -> bytes:
        numbers = [secrets.randbelow(10**9) for _ in range(self.jobs or 1)]
        body: Any = {"spec": spec(numbers[0]), "code_archive": ""}
        if self.jobs:
            body = {"jobs": [{"spec": spec(number), "code_archive": ""} for number in numbers]}
        data = json.dumps(body).encode()
        path = "/v1/jobs/bulk" if self.jobs else "/v1/jobs"
        return HEAD.format(path, self.token, secrets.token_hex(16), len(data)).encode() + data

    async def client(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self.socket, limit=2**20)
        while time.perf_counter() < self.end_s and not self.error:
            request, begun_s = self.request(), time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            body = await reader.readexactly(int(length.partition(b":")[2]))
            if b" 201 " not in head[:20]:
                self.error = body.decode()[:500]
                break
            self.samples_s.append(time.perf_counter() - begun_s)
        writer.close()


async def main() -> None:
    socket, token, clients, seconds, *jobs = sys.argv[1:]
    begun_s = time.perf_counter()
    load = Load(socket, token, float(seconds), int(jobs[0]) if jobs else 0)
    await asyncio.gather(*(load.client() for _ in range(int(clients))))
    took_s = time.perf_counter() - begun_s
    sys.stdout.write(
        json.dumps({"samples_s": load.samples_s, "took_s": took_s, "cpu_s": time.process_time(), "error": load.error})
    )


if __name__ == "__main__":
    asyncio.run(main())
