"""Carries Ethernet frames between two TAP devices, each frame so many seconds late: `bed_relay.py TAP TAP SECONDS`.

Linux shapes delay by netem, which many kernels are built without. It makes the devices, says `ready`, and ends when its
standard input does.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
LONGEST_FRAME = 1 << 16


def tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def relay(devices: tuple[int, int], delay_s: float) -> None:
    other = dict(zip(devices, reversed(devices), strict=True))
    late: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        there, _, _ = select.select([0, *devices], [], [], wait_s)
        if 0 in there:
            return
        for device in set(there):
            late.append((time.monotonic() + delay_s, other[device], os.read(device, LONGEST_FRAME)))
        while late and late[0][0] <= time.monotonic():
            _, device, frame = late.popleft()
            try:
                os.write(device, frame)
            except OSError:  # the device is down, or its queue is full: frames get lost
                continue


if __name__ == "__main__":
    both = tap(sys.argv[1]), tap(sys.argv[2])
    os.write(1, b"ready\n")
    relay(both, float(sys.argv[3]))
