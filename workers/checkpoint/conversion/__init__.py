"""Which dtype a tensor gets on a target, how its bytes are converted, and what that changes."""
