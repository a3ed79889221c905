"""What happens on the wire between machines: which packets are dropped, and how fast the others go. Rules are text made
from the faults there are now, so that a machine that boots again gets them too.

A cut drops packets where they arrive, so that whoever sends them notices nothing; nothing is refused or reset.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

EVERYBODY = "*"
HOST = "host"


@dataclass
class Faults:
    """`cuts`: (from, to) of names, EVERYBODY for all others. By machine: which share of the packets that arrive there
    is lost, how fast it sends and receives (as tc writes it), and how late in seconds, each way.
    """

    cuts: set[tuple[str, str]] = field(default_factory=set)
    loss: dict[str, float] = field(default_factory=dict)
    rate: dict[str, str] = field(default_factory=dict)
    delay_s: dict[str, float] = field(default_factory=dict)


def filters(name: str, faults: Faults, addresses: Mapping[str, str]) -> str:
    """For iptables-restore on machine `name`. `addresses` has the host's too; its own filters are left alone, and so
    what it is not to hear is dropped where it is sent.
    """
    rules = [f"-A INPUT ! -i lo{_of('-s', source, addresses)} -j DROP" for source in _into(name, faults)]
    if {(name, HOST), (name, EVERYBODY), (EVERYBODY, HOST)} & faults.cuts:
        rules.append(f"-A OUTPUT -d {addresses[HOST]} -j DROP")
    if share := faults.loss.get(name):
        rules.append(f"-A INPUT ! -i lo -m statistic --mode random --probability {share} -j DROP")
    empty = [f":{chain} ACCEPT [0:0]" for chain in ("INPUT", "FORWARD", "OUTPUT")]
    return "\n".join(["*filter", *empty, *rules, "COMMIT\n"])


def _into(name: str, faults: Faults) -> Iterable[str]:
    """From whom nothing arrives there."""
    return sorted(s for s, t in faults.cuts if (t == name and s != name) or (t == EVERYBODY and s != name))


def _of(flag: str, name: str, addresses: Mapping[str, str]) -> str:
    return "" if name == EVERYBODY else f" {flag} {addresses[name]}"


def shaping(device: str, rate: str | None) -> list[list[str]]:
    """Commands of tc that set how fast `device` sends; None: as fast as it can. The first may fail."""
    remove = ["tc", "qdisc", "del", "dev", device, "root"]
    if rate is None:
        return [remove]
    # A fast link needs more: with 16 kB one of 1 Gb/s carried 64 to 77 MB/s between busy machines, with 256 kB 117.
    burst = "256kb" if rate.endswith("gbit") else "16kb"
    limits = ["rate", rate, "burst", burst, "latency", "400ms"]
    return [remove, ["tc", "qdisc", "add", "dev", device, "root", "tbf", *limits]]
