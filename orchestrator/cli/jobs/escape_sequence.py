"""Escape sequence that leaves a shell, even if it does not respond: Enter, then `~.`, as in ssh. Does no I/O."""

LEAVE, TILDE, NEWLINES = ord("."), ord("~"), b"\r\n"


class EscapeFilter:
    """Filter for typed bytes. `~~` at the start of a line sends one `~`; `~` before another character is sent, too."""

    def __init__(self) -> None:
        self._at_line_start, self._pending_tilde = True, False

    def feed(self, typed: bytes) -> tuple[bytes, bool]:
        """Return (bytes to send, whether to leave)."""
        sent = bytearray()
        for char in typed:
            if self._pending_tilde:
                self._pending_tilde = False
                if char == LEAVE:
                    return bytes(sent), True
                if char != TILDE:
                    sent.append(TILDE)
            elif self._at_line_start and char == TILDE:
                self._pending_tilde, self._at_line_start = True, False
                continue
            sent.append(char)
            self._at_line_start = char in NEWLINES
        return bytes(sent), False
