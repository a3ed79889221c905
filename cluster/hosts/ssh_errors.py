"""What `ssh` prints if it cannot connect, as an error with the host, the reason and the next step."""

from cluster.errors import FleetError, PolyfleetError, UserError

MAX_LOG_LINE_LENGTH = 300
NO_CONNECTION = ("kex_exchange_identification:", "connection closed by unknown")
"""How ssh's last line begins if the connection that a jump host should forward was never made."""


class HostUnreachable(FleetError):
    """The host does not respond now."""


class HostRefused(UserError):
    """The host cannot be used: unknown or changed host key, our key is not accepted, or unknown name."""


def remedy(host: str, jump: str = "") -> str:
    return f"check that `{ssh_command(host, jump)} true` works, then run the command again"


def ssh_command(host: str, jump: str = "") -> str:
    """Return the command with which a user tries the same connection."""
    return f"ssh -J {jump} {host}" if jump else f"ssh {host}"


def failure(host: str, stderr: str, jump: str = "") -> PolyfleetError:
    """Return the error for the message that ssh printed when it could not connect to `host`, through `jump` if set.

    A jump host has an `ssh` of its own, which prints into the same stream before the first one does.
    """
    lines = [line.strip()[:MAX_LOG_LINE_LENGTH] for line in stderr.splitlines() if line.strip()]
    by_jump = [line for line in lines if not line.lower().startswith(NO_CONNECTION)] if jump else []
    if by_jump and len(by_jump) < len(lines):
        return _jump_failure(host, by_jump, jump)
    login = "name the right `ssh.user` and `ssh.key`"
    # A time limit does not show on which of the two connections the time was spent.
    through = f" through jump host {jump}" if jump else ""
    return _refusal(f"host {host}", host, lines, login) or HostUnreachable(
        f"host {host} cannot be reached{through}: {lines[-1] if lines else 'ssh gave no reason'}", remedy(host, jump)
    )


def _jump_failure(host: str, lines: list[str], jump: str) -> PolyfleetError:
    if refused := [line for line in lines if "open failed:" in line]:
        _, reason = refused[0].split("open failed:", 1)
        return HostUnreachable(
            f"host {host} cannot be reached from jump host {jump}: {reason.strip()}", remedy(host, jump)
        )
    login = "name its `User` and `IdentityFile` in your SSH configuration"
    return _refusal(f"jump host {jump}", jump, lines, login) or HostUnreachable(
        f"jump host {jump} cannot be reached: {lines[-1]}", remedy(host, jump)
    )


def _refusal(name: str, host: str, lines: list[str], login: str) -> HostRefused | None:
    """`name` is for sentences, `host` for commands; `login` says where user and key are set."""
    lowered = "\n".join(lines).lower()
    if "could not resolve hostname" in lowered or "name or service not known" in lowered:
        return HostRefused(f"{name} is unknown: {lines[-1]}", "write a name that `ssh` can resolve, or its IP address")
    if "identification has changed" in lowered:
        return HostRefused(
            f"the key of {name} is not the one in known_hosts",
            "find out why, since another machine may be using its name; then remove the old key: `ssh-keygen -R`",
        )
    if "host key verification failed" in lowered or "no matching host key" in lowered:
        return HostRefused(
            f"the key of {name} is not in any known_hosts file",
            f"run `{ssh_command(host)}` once, and compare the fingerprint that it shows with the host's own",
        )
    if "permission denied" in lowered or "too many authentication failures" in lowered:
        return HostRefused(f"{name} refuses our key: {lines[-1]}", f"{login}, or add the key there: ssh-copy-id {host}")
    return None
